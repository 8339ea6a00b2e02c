"""What a thousand ranks cost their launcher and its store grows with their number."""

import contextlib
import os
import time

from test_launch import start

from keras_dist.launch.failures import Failure, Report, verdict
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
    text, _ = verdict([report], "", hosts=hosts, unknown=unknown)
    assert text.splitlines() == [
        "keras-dist: rank 7 on h0 failed first, in step 7 of epoch 1.",
        "Rank 7 on h0: KeyError: 'tea'",
        "Ranks 0 to 6, 8 to 991 on 124 hosts were in step 7 of epoch 1: ended with it",
        "Ranks 992 to 999 on h124: their hosts have sent no report.",
    ]
