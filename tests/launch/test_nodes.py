"""The same command several times, on one machine: `keras-dist run --nnodes --rdzv`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from harness.forked import slurm, torchrun
from harness.launching import (
    PYTHONPATH,
    ROOT,
    RUN,
    free_port,
    launch,
    run,
    start,
    until,
    write_script,
)
from harness.meeting import SECRET, ended, meet

from keras_dist.clusters import Place
from keras_dist.launch.meeting import Meeting
from keras_dist.launch.store import StoreClient, find_store, store_variables

_SCRIPT = """
import os, sys, time
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
print("rank", rank, "of", os.environ["HOROVOD_SIZE"], "start", start, flush=True)
if sys.argv[1:] == [rank] and start == "0":
    raise KeyError("tea")
time.sleep(0.5 if start == "1" else 60)
"""


def test_a_job_that_meets_starts_again_and_prints_the_first_cause(
    tmp_path, left_behind
):
    """With one rank and one rank; the second command says where the cause is."""
    (code, first, errors), (other_code, second, other_errors) = ended(
        *meet("--restarts", 1, write_script(tmp_path, _SCRIPT), 1)
    )
    assert code == other_code == 0, errors
    for number in (0, 1):
        assert f"rank 0 of 2 start {number}\n" in first
        assert f"[1] rank 1 of 2 start {number}\n" in second
    assert errors.startswith("keras-dist: rank 1 on "), errors
    assert "KeyError: 'tea'" in errors
    assert errors.endswith("keras-dist: start 2 of at most 2.\n")
    assert other_errors == ""


_THREADS = "import os; print('threads', os.environ['KERAS_DIST_THREADS'])"


def test_ranks_of_a_small_and_a_large_host_have_as_many_threads(tmp_path, left_behind):
    """Norms depend on the number of threads, and with them the weights."""
    script, port = write_script(tmp_path, _THREADS), free_port()
    every = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(every)])
        [small] = meet("-np", 1, script, numbers=[0], port=port)
    finally:
        os.sched_setaffinity(0, every)
    [large] = meet("-np", 1, script, numbers=[1], port=port)
    for code, out, errors in ended(small, large):
        assert code == 0 and out.endswith("threads 1\n"), errors


@pytest.mark.parametrize("is_read", [True, False])
def test_ctrl_c_of_one_command_ends_all(tmp_path, left_behind, is_read):
    """With the same exit code; nothing is left behind.

    Also where nobody reads what the first host says, as where its terminal is gone.
    """
    processes = meet("-np", 2, write_script(tmp_path, _SCRIPT))
    assert "rank" in processes[0].stdout.readline()
    if not is_read:
        processes[0].stderr.close()
    processes[1].send_signal(signal.SIGINT)
    for code, _, errors in ended(*processes, seconds=20):
        assert code == 128 + signal.SIGINT
        assert "keras-dist: ended by SIGINT on " in errors or not is_read, errors


@pytest.mark.long
def test_the_loss_of_the_first_host_is_named(tmp_path, left_behind):
    """The other one ends by itself, with all that it has started."""
    first, other = meet("-np", 1, write_script(tmp_path, _SCRIPT))
    assert "rank" in other.stdout.readline()
    first.kill()
    [(code, _, errors)] = ended(other, seconds=30)
    assert code == 1 and "The first host was lost, and the job" in errors, errors
    first.communicate()


def wait_for_threads(*processes):
    """Until each process has come so far that it has a thread, and a second more."""
    counts = [psutil.Process(each.pid).num_threads for each in processes]
    until(lambda: all(count() > 1 for count in counts), "threads", 60)
    time.sleep(1)


def test_ctrl_c_of_a_command_that_waits_for_others_ends_soon(tmp_path):
    """On the first host it ends those that have come; others do not wait for it."""
    first, leaving, waiting = meet("-m", "this", numbers=range(3), of=4)
    wait_for_threads(first)  # its store
    wait_for_threads(leaving, waiting)  # their heartbeats
    leaving.send_signal(signal.SIGINT)
    assert ended(leaving, seconds=10) == [(130, "", "keras-dist: ended by SIGINT.\n")]
    first.send_signal(signal.SIGINT)
    for code, _, errors in ended(first, waiting, seconds=8):
        assert code == 130 and errors == "keras-dist: ended by SIGINT.\n"


def test_who_is_missing_is_said():
    """When the time is over, by the number of the host."""
    port = free_port()
    command = [*RUN, "--nnodes", 3, "--rdzv", f"127.0.0.1:{port}", "--node-rank"]
    messages = "missing: host 1, 2", f"cannot reach 127.0.0.1:{port}"
    for number, message in enumerate(messages):
        env = {"PYTHONPATH": PYTHONPATH, **SECRET, "KERAS_DIST_HOSTS_SECONDS": "1"}
        done = launch([*command, number, "-m", "this"], timeout=60, env=env)
        assert done.returncode == 1
        assert message in done.stderr


def test_a_number_that_two_hosts_have_is_named(tmp_path, left_behind):
    """On the one that is not needed; the others have one of them."""
    port, script = free_port(), write_script(tmp_path, _SCRIPT)
    first, *twins = meet(script, numbers=(0, 1, 1), of=3, port=port)
    wait_for_threads(*twins)
    [last] = meet(script, numbers=[2], of=3, port=port)
    assert "rank" in first.stdout.readline()
    until(lambda: [p for p in twins if p.poll() is not None], "the end of one", 60)
    needed, other = sorted(twins, key=lambda process: process.poll() is not None)
    [(code, _, errors)] = ended(other)
    assert code == 1 and "one more, with the number 1." in errors, errors
    first.send_signal(signal.SIGINT)
    assert [code for code, _, _ in ended(first, last, needed)] == [130] * 3


_PRINTS = """
import os
print(*(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_SIZE")))
"""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (torchrun, "Received: rank 1 of 2 from RANK, WORLD_SIZE,"),
        (slurm, "Let srun start the script, without `keras-dist run`"),
    ],
)
def test_a_launcher_that_another_one_has_started_several_times_is_an_error(
    variables, message
):
    """Each would start ranks for all of the data, and write the same files."""
    done = run("-np", 2, "-m", "this", **variables(1, 2, 1))
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr


def test_the_command_for_kubeflow_runs_as_one_job(tmp_path):
    """With the variables that the runtime sets on each node."""
    write_script(tmp_path, _PRINTS, "digits.py")
    job = yaml.safe_load((ROOT / "examples/kubernetes/trainjob.yaml").read_text())
    shell = job["spec"]["trainer"]["command"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    nodes = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PATH": path, **SECRET}
    nodes |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
    env = {"PYTHONPATH": PYTHONPATH, **nodes}
    found = ended(
        *(start(shell, env=env | {"PET_NODE_RANK": k}, cwd=tmp_path) for k in "01")
    )
    assert [printed for _, printed, _ in found] == ["0 2 1\n", "[1] 1 2 1\n"], found


def test_a_value_that_this_job_has_not_signed_does_not_count(store):
    """Not even where somebody has read the token of the requests on the network."""
    first, host = (StoreClient("127.0.0.1", store.port, "secret") for _ in range(2))
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


def test_the_values_of_an_earlier_start_do_not_count(store, client):
    """Else the next one's ranks would find them."""
    again = store_variables("127.0.0.1", store.port, "secret", start=1)
    assert client.put("beat", 1) and client.get("beat") == 1
    assert find_store(again).get("beat") is None
