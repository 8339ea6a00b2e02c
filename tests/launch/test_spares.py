"""`--spare`: a process that has imported TensorFlow becomes a rank."""

import json
import os
import secrets
import signal
from pathlib import Path

import pytest
from test_launch import start as run

from keras_dist.launch import processes, spares
from keras_dist.launch.hosts import slots
from keras_dist.launch.ranks import Assignment, Command, run_ranks
from keras_dist.launch.spares import Spares

_SCRIPT = """
import json, os, sys, time
has_tensorflow = "tensorflow" in sys.modules
names = ["HOROVOD_RANK", "KERAS_DIST_RESTART", "ONLY_AT_FIRST"]
found = [os.getpid(), has_tensorflow, sys.argv[1:], sys.stdin.read(), __name__]
with open(sys.argv[1], "w") as file:
    json.dump([*found, [os.environ.get(name) for name in names], sys.path[0]], file)
time.sleep(float(sys.argv[2]))
raise KeyError("tea")
"""


def test_a_spare_process_becomes_a_rank_of_the_next_start(tmp_path, monkeypatch):
    """With its own arguments and environment, as one that has just been started."""
    monkeypatch.setattr(spares, "FILL_SECONDS", 0.0)
    script, job, own = tmp_path / "script.py", secrets.token_hex(8), Spares()
    script.write_text(_SCRIPT)
    found = []
    for restart in (0, 1):
        waiting = list(own.pids)
        assignment = Assignment(slots([("a", 1)]), {}, "s", restart=restart)
        environment = {} if restart else {"ONLY_AT_FIRST": "1"}
        path = tmp_path / f"found.{restart}"
        words = [str(script), str(path), "0.5"]
        report = run_ranks(
            Command("script", words, environment),
            assignment,
            job,
            address="127.0.0.1",
            stopped=[],
            spares=own,
        )
        (failure,) = report.failures
        assert failure.summary == "KeyError: 'tea'" and failure.code == 1
        assert "rank_process" not in failure.text
        found.append((waiting, json.loads(path.read_text())))
    (none, first), (one, second) = found
    assert none == [] and one == [second[0]]
    assert first[1:] == [
        False,
        [str(tmp_path / "found.0"), "0.5"],
        "",
        "__main__",
        ["0", None, "1"],
        str(tmp_path),
    ]
    expected = [*first[1:-2], ["0", "1", None], first[-1]]
    expected[:2] = True, [str(tmp_path / "found.1"), "0.5"]
    assert second[1:] == expected
    (left,) = own.pids
    assert processes.members(job) == [left]
    processes.end(job, [])
    assert not Path(f"/proc/{left}").exists() or os.waitpid(left, 0)


def test_a_spare_process_that_has_ended_is_none():
    """The rank is started as without it."""
    own = Spares()
    own.fill(1, {"PATH": os.environ["PATH"]})
    (process,) = own._idle
    process.kill()
    process.wait()
    assert own.take("script", ["x.py"], {}) is None and not own.pids


def test_without_the_option_they_are_there_while_a_start_is_near(monkeypatch):
    """As far as there is memory for them; and they end when no start is near."""
    own, own_ones = Spares(is_lasting=False), []
    environment = {"PATH": os.environ["PATH"]}
    try:
        for is_near, room, count in [
            (False, 1, 0),
            (True, 1 << 60, 0),
            (True, 1, 2),
            (True, 1 << 60, 2),
            (False, 1, 0),
        ]:
            monkeypatch.setattr(spares, "_ROOM", room)
            own.is_start_near = is_near
            own.keep(2, environment, 100.0)
            own_ones += own._idle
            assert len(own.pids) == count
    finally:
        own.end()
    assert all(process.returncode == -signal.SIGKILL for process in own_ones)


@pytest.mark.parametrize("words", [["-H", "a:1"], ["--hostfile", "x"]])
def test_hosts_by_ssh_have_no_spare_processes(words):
    """Their agents end with each start."""
    done = run("--spare", *words, "-m", "this")
    assert done.returncode == 1 and "`--spare` needs commands that stay" in done.stderr
