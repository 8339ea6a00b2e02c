"""The same command several times, on one machine: `keras-dist run --nnodes --rdzv`."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest
from launch import PYTHONPATH, ROOT
from test_launch import RUN, left_behind
from test_launch import start as run

from keras_dist.launch.agent import Agent
from keras_dist.launch.environments import slurm
from keras_dist.launch.hosts import Member, assign_slots, number_hosts
from keras_dist.launch.ranks import Command
from keras_dist.launch.store import OwnStoreClient, Store, StoreClient

SECRET = {"KERAS_DIST_SECRET": "a secret of these tests"}

_SCRIPT = """
import os, sys, time
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
print("rank", rank, "of", os.environ["HOROVOD_SIZE"], "start", start, flush=True)
if sys.argv[1:] == [rank] and start == "0":
    raise KeyError("tea")
time.sleep(0.5 if start == "1" else 60)
"""


def free_port():
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
    return [command(*common, *words, mark=mark) for _ in range(count)]


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
    assert errors.startswith("keras-dist: 2 ranks on "), errors
    assert errors.split("\n")[1].startswith("keras-dist: rank 1 on "), errors
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


def wait_for_threads(*processes):
    """Until each process has come so far that it has a thread, and a second more."""
    begin = time.monotonic()
    while any(psutil.Process(each.pid).num_threads() < 2 for each in processes):
        assert time.monotonic() - begin < 60
        time.sleep(0.1)
    time.sleep(1)


def test_ctrl_c_of_a_command_that_waits_for_others_ends_soon(tmp_path):
    """On the first host it ends those that have come; another one just leaves."""
    options = ["--nnodes", 4, "--rdzv", f"127.0.0.1:{free_port()}"]
    first = command(*options, "-m", "this")
    wait_for_threads(first)  # its store
    leaving, waiting = (command(*options, "-m", "this") for _ in range(2))
    wait_for_threads(leaving, waiting)  # their heartbeats
    leaving.send_signal(signal.SIGINT)
    assert ended([leaving], 10) == [(130, "", "")]
    first.send_signal(signal.SIGINT)
    for code, _, errors in ended([first, waiting], 8):
        assert code == 130 and errors.startswith("keras-dist: ended by SIGINT on ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", 2], "need `--nnodes` and `--rdzv`"),
        (["--rdzv", "a:1"], "need `--nnodes` and `--rdzv`"),
        (["--nnodes", 2, "--rdzv", "a:1", "-H", "a:1"], "and no `-H`"),
        (["--nnodes", 2, "--rdzv", "a:b"], "its name or address, and a port"),
        (["--nnodes", 2, "--rdzv", "a:1"], "needs a secret of at least 16"),
        (["--nnodes", 0, "--rdzv", "localhost:1"], "on at least one host"),
        (["--nnodes", "1:2", "--rdzv", "localhost:1"], "A number of hosts is needed"),
        (
            ["--nnodes", 2, "--node-rank", 2, "--rdzv", "localhost:1"],
            "numbered from 0 to one less",
        ),
    ],
)
def test_what_cannot_meet_is_named(words, message):
    """Before anything listens."""
    done = run(*words, "-m", "this", KERAS_DIST_SECRET="short")
    assert done.returncode == 1
    assert message in done.stderr and "Received" in done.stderr


def test_a_secret_that_others_may_read_is_a_warning(tmp_path):
    """With what to do; the job is started all the same."""
    file = tmp_path / "secret"
    file.write_text("a secret of these tests\n")
    meeting = ["--nnodes", 1, "--rdzv", f"127.0.0.1:{free_port()}", "--secret-file"]
    for mode, is_open in ((0o600, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        done = run(*meeting, file, "-np", 1, "true")
        assert done.returncode == 0, done.stderr
        assert ("other users of this machine may" in done.stderr) == is_open
        assert (f"with mode {mode:o}. Call: chmod 600 {file}" in done.stderr) == is_open


def test_who_is_missing_is_said(tmp_path):
    """When the time is over, by the number of the host."""
    port = free_port()
    options = ["--nnodes", 3, "--rdzv", f"127.0.0.1:{port}", "--rdzv-timeout", 1]
    done = run(*options, "-m", "this")
    assert done.returncode == 1
    assert "missing: node rank 1, node rank 2" in done.stderr
    begin = time.monotonic()
    done = run(*options, "--node-rank", 1, "-m", "this")
    assert done.returncode == 1 and time.monotonic() - begin < 20
    assert f"cannot reach 127.0.0.1:{port}" in done.stderr


def test_numbers_are_kept_and_each_is_given_once():
    """For all orders in which four come, some with a number."""
    for numbers in itertools.product((None, 0, 1, 2), repeat=4):
        for count in range(5):
            members = {f"m{k}": Member(f"h{k}", 1, numbers[k]) for k in range(count)}
            found = number_hosts(members, 3)
            given = [name for name in found if name is not None]
            assert len(set(given)) == len(given)
            for number, name in enumerate(found):
                assert name is None or members[name].number in (None, number)
            wanted = {number for number in numbers[:count] if number is not None}
            free = sum(number is None for number in numbers[:count])
            assert len(given) == min(3, len(wanted) + free)


def test_slots_count_each_rank_once_and_hosts_by_name():
    """Several members of one name are one host, whose ranks count through."""
    for names in itertools.product("ab", repeat=3):
        for counts in itertools.product((1, 2), repeat=3):
            members = [Member(n, c) for n, c in zip(names, counts, strict=True)]
            found = assign_slots(members)
            assert [len(own) for own in found] == list(counts)
            slots = [slot for own in found for slot in own]
            assert sorted(slot.rank for slot in slots) == list(range(sum(counts)))
            for name in set(names):
                local = [slot.local_rank for slot in slots if slot.host == name]
                assert sorted(local) == list(range(len(local)))
                assert {s.local_size for s in slots if s.host == name} == {len(local)}


def test_a_value_that_this_job_has_not_signed_does_not_count():
    """Not even where somebody has read the token of the requests on the network."""
    store = Store()
    try:
        first = OwnStoreClient(store, "a secret")
        host = StoreClient("127.0.0.1", store.port, "a secret")
        assert host.put("join.b", [1]) and first.of_kind("join") == {"b": [1]}
        forged = json.dumps([2]).encode()
        assert host._request("PUT", "join.c", forged) is not None
        assert host._request("PUT", "join.d", host._request("GET", "join.b")) == b""
        assert host.get("join.c") is None and first.of_kind("join") == {"b": [1]}
        assert StoreClient("127.0.0.1", store.port, "a guess").put("x", 1) is False
        with pytest.raises(PermissionError):
            StoreClient("127.0.0.1", store.port, "a guess").probe()
    finally:
        store.close()


def test_a_host_that_comes_before_the_first_one_is_ready_is_not_refused():
    """The store listens a moment before it knows the secret; the host asks again."""
    store = Store()
    try:
        host = StoreClient("127.0.0.1", store.port, "a secret")
        with pytest.raises(ConnectionError, match="no store answers: status 503"):
            host.probe()
        late = threading.Timer(1, store.admit, ["a secret"])
        late.start()
        found = host.wait("b", timeout=30)
        late.join()
        assert found == ("127.0.0.1", "127.0.0.1")
        with pytest.raises(PermissionError):
            StoreClient("127.0.0.1", store.port, "a guess").probe()
    finally:
        store.close()


def test_a_host_that_has_not_seen_the_start_reports_at_the_order_to_stop():
    """Another one may fail within half a second; it would count as lost."""
    store = Store()
    try:
        first = OwnStoreClient(store, "a secret", num_hosts=2)
        host = StoreClient("127.0.0.1", store.port, "a secret")
        member = Member("b", 1, 1)
        agent = Agent(host, "a secret", member, num_hosts=2, stopped=[])
        order = {"nonce": first.nonce}
        first.put("order", {**order, "do": "stop", "start": 4})
        assert agent.join(60)

        def end_when_reported():
            while not first.of_kind("report"):
                time.sleep(0.05)
            first.put("order", {**order, "do": "exit", "code": 3, "text": ""})

        threading.Thread(target=end_when_reported, daemon=True).start()
        assert agent.follow(Command("script", ["none.py"], {}), "none") == 3
        assert list(first.of_kind("report")) == [f"4.{agent.name}"]
        assert first.of_kind("left") == {agent.name: True}
    finally:
        store.close()


def test_a_host_ends_where_the_first_one_has_begun_a_new_job(tmp_path):
    """Its command was killed and started again, sooner than it could be missed."""
    script = f"open({str(tmp_path / 'there')!r}, 'w'); import time; time.sleep(60)"
    stores, secret = [Store()], "a secret of these tests"
    port = stores[0].port
    first = OwnStoreClient(stores[0], secret, num_hosts=2)
    host = StoreClient("127.0.0.1", port, secret)
    agent = Agent(host, secret, Member("b", 1, 1), num_hosts=2, stopped=[])
    assert agent.join(60)
    order = {"do": "run", "start": 0, "seed": "1", "reached": "127.0.0.1"}
    order |= {"nonce": first.nonce, "hosts": [[agent.name, "b", 1]]}
    first.put("order", order)

    def begin_again():
        while not (tmp_path / "there").exists():
            time.sleep(0.05)
        stores[0].close()
        stores.append(Store(port=port))
        OwnStoreClient(stores[1], secret)

    threading.Thread(target=begin_again, daemon=True).start()
    command = Command("program", [sys.executable, "-c", script], {})
    try:
        with pytest.raises(ValueError, match="was started again, and the job"):
            agent.follow(command, "none")
    finally:
        stores[-1].close()


def test_ranks_of_an_earlier_start_are_refused():
    """Each start has a token and values of its own."""
    store = Store()
    try:
        first, second = (
            StoreClient("127.0.0.1", store.port, secret) for secret in ("one", "two")
        )
        slots = [slot for own in assign_slots([Member("a", 2, 0)]) for slot in own]
        store.open(slots, "one")
        assert first.put("beat", 1) and not second.put("beat", 1)
        store.open(slots, "two")
        assert second.get("beat") is None and second.put("beat", 2)
        assert first.get("beat") is None and not first.put("beat", 1)
    finally:
        store.close()


def test_every_task_of_slurm_is_a_host_node_by_node():
    """For block and cyclic distributions of unequal counts."""
    counts = (3, 1, 2)
    block = [(node, local) for node in range(3) for local in range(counts[node])]
    cyclic = sorted(block, key=lambda each: (each[1], each[0]))
    common = {
        "SLURM_STEP_NODELIST": "127.0.0.[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "1",
    }
    for tasks in (block, cyclic):
        for number, (node, local) in enumerate(tasks):
            own = {"PROCID": number, "NODEID": node, "LOCALID": local}
            found = slurm(common | {f"SLURM_{k}": str(v) for k, v in own.items()})
            assert block[found.number] == (node, local)
            assert (found.num_hosts, found.address) == (6, "127.0.0.1")
            assert found.names[found.number] == found.host == f"127.0.0.{node + 1}"
    assert slurm({**common, "SLURM_PROCID": "0"}) is None
    assert slurm({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) is None
