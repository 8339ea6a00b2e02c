"""When a host counts as lost, by its heartbeats and the clock of the one that looks."""

import threading
from collections import Counter

import pytest
from harness.launching import until

from keras_dist.clusters import Place
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.store import StoreClient


@pytest.fixture
def first():
    """The first of two hosts that have come."""
    place = Place("keras-dist run", 0, 2, address="127.0.0.1")
    return Meeting(place, "", kind="host", name="a", timeout=1.0)


def pass_time(first, seconds, *, beating):
    """So many seconds, in which these hosts send heartbeats; who was lost when."""
    lost = {}
    for second in range(1, seconds + 1):
        beat = {"beat": [second, seconds]}
        first._note({f"{first.nonce}.{k}": beat for k in beating}, 1.01)
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


def gather_on_both(*values):
    """A thread for each of two hosts, which gather the sum of values."""
    found, port, meetings = {}, 0, []
    for number in range(2):
        place = Place("keras-dist run", number, 2, address="127.0.0.1", port=port)
        meetings.append(Meeting(place, "secret", kind="host", name="a", timeout=5.0))
        port = meetings[0]._port

    def run(number):
        with meetings[number] as meeting:
            value = meeting.gather("report", values[number], lambda v: {"sum": sum(v)})
        found[number] = value

    for number in range(2):
        threading.Thread(target=run, args=[number], daemon=True).start()
    until(lambda: len(found) == 2, "both hosts")
    return found


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_value_that_an_outage_has_lost_is_sent_again(monkeypatch, name):
    """That of a host, and, by the first one, the result of all."""
    request, counts = StoreClient._request, Counter()

    def fail(client, method, path, body=None):
        if method == "PUT" and path.partition(".")[2] == name:
            counts[name] += 1
            if counts[name] <= 12:
                return None
        return request(client, method, path, body)

    monkeypatch.setattr(StoreClient, "_request", fail)
    assert gather_on_both(1, 2) == {0: {"sum": 3}, 1: {"sum": 3}}
    assert counts[name] > 12
