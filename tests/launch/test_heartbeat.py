"""When a host counts as lost, by its heartbeats and the clock of the first host."""

import pytest

from keras_dist.launch import job


class Clock:
    """The time, and the heartbeats that have come by then: a store's client."""

    def __init__(self):
        self.now, self.beats = 1000.0, {}

    def monotonic(self):
        """As of `time.monotonic`."""
        return self.now

    def put_surely(self, name, value):
        """As of `StoreClient`; nobody reads it."""

    def get_all(self, prefix):
        """As of `StoreClient`."""
        return dict(self.beats)


@pytest.fixture
def clock(monkeypatch):
    """A clock that `pass_time` sets forward."""
    clock = Clock()
    monkeypatch.setattr(job, "time", clock)
    return clock


@pytest.fixture
def first(clock):
    """The coordinator of two hosts that have come."""
    first = job.Coordinator(clock, None, 2, 0, None, is_quiet=True)
    first._hosts = {0: ["id0", "a", 1, ""], 1: ["id1", "b", 1, ""]}
    return first


def pass_time(clock, first, seconds, *, beating):
    """So many seconds, in which these hosts send heartbeats; who was lost when."""
    lost = {}
    for second in range(1, seconds + 1):
        clock.now += 1.01
        for number in beating:
            clock.beats[f"beat.{number}"] = [int(clock.now)]
        first._look()
        for number in first._lost([0, 1]):
            lost.setdefault(number, second)
    return lost


def test_a_host_is_lost_after_15_seconds_of_silence(clock, first):
    """Not before."""
    assert pass_time(clock, first, 10, beating=[0, 1]) == {}
    assert pass_time(clock, first, 14, beating=[0]) == {}
    assert pass_time(clock, first, 5, beating=[0, 1]) == {}  # an outage of 14 s
    assert set(pass_time(clock, first, 18, beating=[0])) == {1}


def test_the_time_in_which_the_first_host_was_suspended_does_not_count(clock, first):
    """As when a laptop is closed; what comes after it does."""
    pass_time(clock, first, 3, beating=[0, 1])
    clock.now += 3600
    assert pass_time(clock, first, 12, beating=[]) == {}
    assert set(pass_time(clock, first, 6, beating=[])) == {0, 1}
