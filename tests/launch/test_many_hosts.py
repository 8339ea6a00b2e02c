"""What a thousand ranks cost their launcher and its store grows with their number."""

import contextlib
import os
import random
import time
from collections import Counter

import pytest
from test_launch import start

from keras_dist.launch.failures import Failure, Report, verdict
from keras_dist.launch.monitor.watchdog import OtherRanks
from keras_dist.launch.store import (
    Store,
    assign_ranks,
    client_of,
    store_variables,
)

# Reads its environment, and ends a while later.
_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
sleep 1
read message
touch "$0.of.$2"
sleep 3
exit 5
"""


def test_a_host_that_answers_slowly_does_not_delay_the_others(tmp_path):
    """Also where the environment does not fit into a pipe before ssh is connected."""
    ssh = tmp_path / "ssh"
    ssh.write_text(_SSH)
    ssh.chmod(0o755)
    hosts = ",".join(f"h{number}:8" for number in range(16))
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(2)}
    begin = time.monotonic()
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = start("-H", hosts, "-m", "this", **large, **path)
    assert time.monotonic() - begin < 10  # one after the other: 16 and more
    assert len(list(tmp_path.glob("ssh.of.*"))) == 16
    assert done.returncode == 5, done.stderr


class CountingStore:
    """A store in this process, which counts what is asked of it."""

    def __init__(self):
        self.values, self.counts = {}, Counter()

    def put(self, name, value):
        """As of `StoreClient`."""
        self.counts["requests"] += 1
        self.values[name] = value
        return True

    def get(self, name):
        """As of `StoreClient`."""
        self.counts["requests"] += 1
        self.counts["values"] += 1
        return self.values.get(name)

    def get_all(self, prefix):
        """As of `StoreClient`."""
        self.counts["requests"] += 1
        self.counts["values"] += len(self.values)
        return dict(self.values)


def stalled(size, *, dead=0, looks=24):
    """Idle ranks, the first ones of which are dead: their store, and who observed."""
    store, limit = CountingStore(), 120.0
    ranks = [OtherRanks(store, rank=r, size=size, limit=limit) for r in range(size)]
    for rank, own in enumerate(ranks):
        own.publish(status(0, 0.0) | {"host": f"h{rank // 8}"})
    store.counts.clear()
    observers = []
    for look in range(1, looks + 1):
        now = 60.0 + 5 * look
        found = set()
        for rank in random.Random(look).sample(range(dead, size), size - dead):
            ranks[rank].publish(status(look, now))
            if ranks[rank].observes(now):
                found.add(rank)
                is_stalled = ranks[rank].are_idle(now)
        observers.append((found, found and is_stalled))
    return store, observers


def status(beat, idle):
    """Of a rank on another host, which waits."""
    return {
        "beat": beat,
        "idle": idle,
        "is_with_others": True,
        "position": "in step 3 of epoch 1",
        "code": None,
        "host": "h",
        "pid": 1,
        "without": [],
    }


def test_the_requests_of_idle_ranks_grow_with_their_number():
    """One of them looks at all others; not with the square, as where each does."""
    for size in (8, 64, 512):
        store, observers = stalled(size)
        assert {frozenset(found) for found, _ in observers} == {frozenset({0})}
        assert observers[-1][1] == (True, True)
        assert store.counts["requests"] <= 24 * (2 * size + 3)
        assert store.counts["values"] <= 24 * (2 * size + 3)


@pytest.mark.parametrize("dead", [1, 8, 100])
def test_another_rank_looks_where_the_first_ones_are_dead(dead):
    """Soon, and one alone; and it says which ranks do not answer."""
    store, observers = stalled(512, dead=dead)
    first = next(number for number, (found, _) in enumerate(observers) if found)
    assert first <= dead.bit_length()
    (last,) = observers[-1][0]
    assert dead <= last < 2 * dead
    assert observers[-1][1] == (True, True)
    own = OtherRanks(store, rank=last, size=512, limit=120.0)
    assert own.observes(300.0)
    own.are_idle(300.0)
    lines = own.announce(status(30, 300.0), 400.0)
    assert own.announced() == lines


def test_a_rank_reads_what_all_have_written_by_one_request():
    """From the launcher's store; a value that is none is `None`."""
    with contextlib.closing(Store("secret")) as own:
        own.open(assign_ranks([("localhost", 2)]))
        store = client_of(store_variables("127.0.0.1", own.port, "secret"))
        assert store.get_all("") == {}
        for name in ("beat.0", "beat.1", "1"):
            store.put(name, {"name": name})
        assert store.get_all("beat.") == {n: {"name": n} for n in ("beat.0", "beat.1")}
        store._request("PUT", "broken", b"\xff{")
        assert store.get_all("b")["broken"] is None
        assert store.get_all("nothing") == {}
        assert store.get_all("1") == {"1": {"name": "1"}}


def test_the_outcomes_of_a_thousand_ranks_are_few_lines():
    """The first failure, and a line for each kind of outcome."""
    failure = Failure(7, 1.0, 3, "KeyError: 'tea'", "", False)
    where = {rank: "in step 7 of epoch 1" for rank in range(992)}
    hosts = {rank: f"h{rank // 8}" for rank in range(1000)}
    unknown = range(992, 1000)
    report = Report([failure], where)
    text, _ = verdict([report], None, hosts=hosts, unknown=unknown)
    assert text.splitlines() == [
        "keras-dist: rank 7 on h0 failed first, in step 7 of epoch 1.",
        "Rank 7 on h0: KeyError: 'tea'",
        "Ranks 0 to 6, 8 to 991 on 124 hosts were in step 7 of epoch 1: ended with it",
        "Ranks 992 to 999 on h124: their hosts have sent no report.",
    ]
