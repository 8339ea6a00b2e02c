"""When a host counts as lost, by its heartbeats and the clock of the launcher."""

import pytest

from keras_dist.launch import job


class Clock:
    """The time, and the heartbeats that have come by then."""

    def __init__(self):
        self.now, self.beats = 1000.0, {}

    def monotonic(self):
        """As of `time.monotonic`."""
        return self.now

    def get(self, name):
        """As of `StoreClient`."""
        return self.beats.get(name)

    def get_all(self, prefix):
        """As of `StoreClient`, where the names of all values begin so."""
        return self.beats


@pytest.fixture
def clock(monkeypatch):
    """A clock that `pass_time` sets forward."""
    clock = Clock()
    monkeypatch.setattr(job, "time", clock)
    return clock


def pass_time(clock, presence, seconds, *, beating, running=(0, 1)):
    """So many seconds, in which these hosts send heartbeats; who was lost when."""
    lost = {}
    for second in range(1, seconds + 1):
        clock.now += 1.01
        for number in beating:
            clock.beats[f"beat.{number}"] = int(clock.now)
        presence.look(list(running))
        for number in presence.lost(list(running)):
            lost.setdefault(number, second)
    return lost


def test_a_host_is_lost_after_15_seconds_of_silence(clock):
    """Not before, nor one that has never answered, nor one whose agent has ended."""
    presence = job.Presence(clock)
    assert pass_time(clock, presence, 10, beating=[0, 1]) == {}
    assert pass_time(clock, presence, 14, beating=[0]) == {}
    assert pass_time(clock, presence, 5, beating=[0, 1]) == {}  # an outage of 14 s
    assert pass_time(clock, presence, 30, beating=[0], running=[0]) == {}
    presence = job.Presence(clock)
    clock.beats.clear()
    assert pass_time(clock, presence, 60, beating=[0]) == {}
    assert pass_time(clock, presence, 5, beating=[0, 1]) == {}
    assert set(pass_time(clock, presence, 18, beating=[0])) == {1}


def test_the_time_in_which_the_launcher_was_suspended_does_not_count(clock):
    """As when a laptop is closed; what comes after it does."""
    presence = job.Presence(clock)
    pass_time(clock, presence, 3, beating=[0, 1])
    clock.now += 3600
    assert pass_time(clock, presence, 12, beating=[]) == {}
    assert set(pass_time(clock, presence, 6, beating=[])) == {0, 1}
