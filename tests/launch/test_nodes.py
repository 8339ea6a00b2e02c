"""The same command several times, on one machine: `keras-dist run --nnodes --rdzv`."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml
from launch import PYTHONPATH, ROOT, free_port, launch
from test_launch import RUN, left_behind
from test_launch import start as run

from keras_dist.clusters import Place
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.store import Store, StoreClient, find_store, store_variables

TWO = ["--nnodes", 2, "--node-rank", 0, "--rdzv"]
SECRET = {"KERAS_DIST_SECRET": "a secret of these tests"}

_SCRIPT = """
import os, sys, time
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
print("rank", rank, "of", os.environ["HOROVOD_SIZE"], "start", start, flush=True)
if sys.argv[1:] == [rank] and start == "0":
    raise KeyError("tea")
time.sleep(0.5 if start == "1" else 60)
"""


def command(*words, mark=""):
    """Start `keras-dist run`."""
    env = {"PYTHONPATH": PYTHONPATH, "MARK_OF_TEST": mark, **SECRET}
    return subprocess.Popen(
        [*RUN, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **env},
        text=True,
    )


def meet(*words, count=2, mark="", options=()):
    """Start the same command so often."""
    common = ["--nnodes", count, "--rdzv", f"127.0.0.1:{free_port()}", *options]
    return [
        command(*common, "--node-rank", number, *words, mark=mark)
        for number in range(count)
    ]


def ended(processes, seconds=60):
    """Exit code and both outputs of each, that of the first host first."""
    found = [(p, *p.communicate(timeout=seconds)) for p in processes]
    found = [(p.returncode, stdout, stderr) for p, stdout, stderr in found]
    return sorted(found, key=lambda each: "[1] " in each[1])


def test_a_job_that_meets_starts_again_and_prints_the_first_cause(tmp_path):
    """With one rank and one rank; the second command says where the cause is."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    (code, first, errors), (other_code, second, other_errors) = ended(
        meet(script, 1, mark=mark, options=["--restarts", 1])
    )
    assert code == other_code == 0, errors
    for start in (0, 1):
        assert f"rank 0 of 2 start {start}\n" in first
        assert f"[1] rank 1 of 2 start {start}\n" in second
    assert errors.startswith("keras-dist: rank 1 on "), errors
    assert "KeyError: 'tea'" in errors
    assert errors.endswith("keras-dist: start 2 of at most 2.\n")
    assert other_errors == ""
    assert left_behind(mark) == []


def test_ctrl_c_of_one_command_ends_all(tmp_path):
    """With the same exit code; nothing is left behind."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    processes = meet("-np", 2, script, mark=mark)
    assert "rank" in processes[1].stdout.readline()
    processes[1].send_signal(signal.SIGINT)
    for code, _, errors in ended(processes):
        assert code == 128 + signal.SIGINT
        assert "keras-dist: ended by SIGINT on " in errors, errors
    assert left_behind(mark) == []


def test_a_job_ends_although_nobody_reads_what_the_first_host_says(tmp_path):
    """As where the terminal is gone: its message is lost, the other host ends."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    processes = meet("-np", 1, script, mark=mark)
    assert "rank" in processes[0].stdout.readline()
    processes[0].stderr.close()
    processes[1].send_signal(signal.SIGINT)
    codes = [process.wait(20) for process in processes]
    assert codes == [128 + signal.SIGINT] * 2
    assert left_behind(mark) == []


@pytest.mark.long
def test_the_loss_of_the_first_host_is_named(tmp_path):
    """The other one ends by itself, with all that it has started."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    first, other = meet("-np", 1, script, mark=mark)
    assert "rank" in other.stdout.readline()
    first.kill()
    code, _, errors = ended([other], 30)[0]
    assert code == 1 and "The first host was lost, and the job" in errors, errors
    first.communicate()
    assert left_behind(mark) == []


def wait_for_threads(*processes):
    """Until each process has come so far that it has a thread, and a second more."""
    begin = time.monotonic()
    while any(psutil.Process(each.pid).num_threads() < 2 for each in processes):
        assert time.monotonic() - begin < 60
        time.sleep(0.1)
    time.sleep(1)


def test_ctrl_c_of_a_command_that_waits_for_others_ends_soon(tmp_path):
    """On the first host it ends those that have come; others do not wait for it."""
    options = ["--nnodes", 4, "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank"]
    first, leaving, waiting = (command(*options, k, "-m", "this") for k in range(3))
    wait_for_threads(first)  # its store
    wait_for_threads(leaving, waiting)  # their heartbeats
    leaving.send_signal(signal.SIGINT)
    assert ended([leaving], 10) == [(130, "", "keras-dist: ended by SIGINT.\n")]
    first.send_signal(signal.SIGINT)
    for code, _, errors in ended([first, waiting], 8):
        assert code == 130 and errors == "keras-dist: ended by SIGINT.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", 2], "needs `--nnodes`, `--node-rank` and `--rdzv`"),
        (["--rdzv", "a:1"], "needs `--nnodes`, `--node-rank` and `--rdzv`"),
        (["--nnodes", 2, "--rdzv", "a:1"], "needs `--nnodes`, `--node-rank` and"),
        ([*TWO, "a:1", "-H", "a:1"], "and no `-H`"),
        ([*TWO, "a:b"], "its name or address, and a port"),
        ([*TWO, "a:1"], "needs a secret of at least 16"),
        ([*TWO, "localhost:1"], "needs a secret of at least 16"),
        ([*TWO, "localhost:1", "--nnodes", 0], "rank 0 of 0"),
        ([*TWO, "localhost:1", "--node-rank", 2], "--nnodes, --node-rank"),
    ],
)
def test_what_cannot_meet_is_named(words, message):
    """Before anything listens."""
    done = run(*words, "-m", "this", KERAS_DIST_SECRET="short")
    assert done.returncode == 1
    assert message in done.stderr and "Received" in done.stderr


_SOON = """
import sys
import keras_dist.launch.job as job
from keras_dist.__main__ import main
job._TIMEOUT = 1.0
sys.exit(main(sys.argv[1:]))
"""


def test_who_is_missing_is_said(tmp_path):
    """When the time is over, by the number of the host."""
    port = free_port()
    script = tmp_path / "keras-dist"
    script.write_text(_SOON)
    words = [sys.executable, script, "run", "--nnodes", 3]
    words += ["--rdzv", f"127.0.0.1:{port}", "--node-rank"]
    env = {"PYTHONPATH": PYTHONPATH, **SECRET}
    for number, message in (
        (0, "missing: host 1, 2"),
        (1, f"cannot reach 127.0.0.1:{port}"),
    ):
        command = [str(word) for word in [*words, number, "-m", "this"]]
        done = launch(command, ranks=None, timeout=60, env=env)
        assert done.returncode == 1
        assert message in done.stderr


def test_a_number_that_two_hosts_have_is_named(tmp_path):
    """On the one that is not needed; the others have one of them."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    options = ["--nnodes", 3, "--rdzv", f"127.0.0.1:{free_port()}", "--node-rank"]
    first, *twins = (command(*options, k, script, mark=mark) for k in (0, 1, 1))
    wait_for_threads(*twins)
    last = command(*options, 2, script, mark=mark)
    assert "rank" in first.stdout.readline()
    found = [process.poll() is None for process in twins]
    while all(found):
        time.sleep(0.1)
        found = [process.poll() is None for process in twins]
    code, _, errors = ended([twins[found.index(False)]])[0]
    assert code == 1 and "one more, with the number 1." in errors, errors
    first.send_signal(signal.SIGINT)
    assert [code for code, _, _ in ended([first, last, twins[found.index(True)]])] == [
        130
    ] * 3
    assert left_behind(mark) == []


_PRINTS = """
import os
print(*(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_SIZE")))
"""


def test_a_launcher_that_another_one_has_started_several_times_is_an_error():
    """Each would start ranks for all of the data, and write the same files."""
    step = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    done = run("-np", 2, "-m", "this", **step)
    assert done.returncode == 1 and done.stdout == ""
    assert "Received: rank 1 of 2 from RANK, WORLD_SIZE," in done.stderr


def test_the_command_for_kubeflow_runs_as_one_job(tmp_path):
    """With the variables that the runtime sets on each node."""
    script = tmp_path / "digits.py"
    script.write_text(_PRINTS)
    job = yaml.safe_load((ROOT / "examples/kubernetes/trainjob.yaml").read_text())
    shell = job["spec"]["trainer"]["command"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    nodes = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PATH": path, **SECRET}
    nodes |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **nodes}
    processes = [
        subprocess.Popen(
            shell,
            env=env | {"PET_NODE_RANK": rank},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    found = ended(processes)
    assert [printed for _, printed, _ in found] == ["0 2 1\n", "[1] 1 2 1\n"], found


def test_a_value_that_this_job_has_not_signed_does_not_count():
    """Not even where somebody has read the token of the requests on the network."""
    store = Store("a secret")
    try:
        first, host = (
            StoreClient("127.0.0.1", store.port, "a secret") for _ in range(2)
        )
        assert host.put("host.1", [1]) and first.get("host.1") == [1]
        forged = json.dumps([2]).encode()
        assert host._request("PUT", "host.2", forged) is not None
        assert host._request("PUT", "host.3", host._request("GET", "host.1")) == b""
        found = {"host.1": [1], "host.2": None, "host.3": None}
        assert host.get("host.2") is None and first.get_all("host.") == found
        assert StoreClient("127.0.0.1", store.port, "a guess").put("x", 1) is False
        place = Place("keras-dist run", 1, 2, address="127.0.0.1", port=store.port)
        with (
            pytest.raises(ValueError, match="refuses this one"),
            Meeting(place, "a guess", kind="host", name="b", timeout=0),
        ):
            pass
    finally:
        store.shutdown()


def test_the_values_of_an_earlier_start_do_not_count():
    """Else the next one's ranks would find them."""
    store = Store("a secret of these tests")
    try:
        first, second = (
            find_store(
                store_variables(
                    "127.0.0.1", store.port, "a secret of these tests", start=start
                )
            )
            for start in (0, 1)
        )
        assert first.put("beat", 1) and first.get("beat") == 1
        assert second.get("beat") is None
    finally:
        store.shutdown()
