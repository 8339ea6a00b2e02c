"""When a host counts as lost, by its heartbeats and the clock of the one that looks."""

import pytest

from keras_dist.clusters import Place
from keras_dist.launch.meeting import Meeting


@pytest.fixture
def first():
    """The first of two hosts that have come."""
    place = Place("keras-dist run", 0, 2, address="127.0.0.1")
    return Meeting(place, "", kind="host", name="a", timeout=1.0)


def pass_time(first, seconds, *, beating):
    """So many seconds, in which these hosts send heartbeats; who was lost when."""
    lost = {}
    for second in range(1, seconds + 1):
        beats = {f"job.beat.{k}": [first.nonce, second, seconds] for k in beating}
        first._note(beats, 1.01)
        for number in first.lost:
            lost.setdefault(number, second)
    return lost


def test_a_host_is_lost_after_15_seconds_of_silence(first):
    """Not before."""
    assert pass_time(first, 10, beating=[0, 1]) == {}
    assert pass_time(first, 14, beating=[0]) == {}
    assert pass_time(first, 5, beating=[0, 1]) == {}  # an outage of 14 s
    assert set(pass_time(first, 18, beating=[0])) == {1}


def test_a_host_does_not_take_itself_for_lost(first):
    """As after Ctrl-Z, or where a laptop was closed."""
    first._note({}, 3600.0)
    assert first.lost == [1]
