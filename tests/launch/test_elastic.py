"""A job loses hosts and gains others: `keras-dist run --nnodes MIN:MAX`."""

import secrets
import signal
import threading
import time
import uuid
import warnings

import keras
import numpy as np
import pytest
from launch import PYTHONPATH
from test_launch import left_behind
from test_launch import start as run
from test_meeting import command, free_port

import keras_dist
from keras_dist.launch import ssh
from keras_dist.launch.coordinator import Plan, run_job
from keras_dist.launch.failures import Failure, Report
from keras_dist.launch.hosts import Member
from keras_dist.launch.joined import JoinedHosts
from keras_dist.launch.ranks import Command
from keras_dist.launch.restarts import NNODES, LeftOut
from keras_dist.launch.ssh import DiscoveredHosts, NamedHosts, Ssh
from keras_dist.launch.store import Store, StoreClient
from keras_dist.version import __version__

SECRET = "a secret of these tests"


class Host(threading.Thread):
    """A host that starts no ranks: it comes, sends heartbeats, and does what it must.

    Its ranks end as `answers` says, a list of "fail" and "finish" for each start; else
    they run until they are asked to save.
    """

    def __init__(self, port, name, answers=(), ranks=1, **member):
        super().__init__(daemon=True)
        self.store, self.name = StoreClient("127.0.0.1", port, SECRET), name
        self.id, self.answers = secrets.token_hex(4), list(answers)
        number = {"a": 0, "b": 1, "c": 2}.get(name)
        own = {"number": number, "num_hosts": 3, "min_hosts": 2} | member
        self.member = Member(name, ranks, version=__version__, **own)
        self.starts, self.slots, self.said = [], [], []
        self.code, self.is_gone, self.is_silent = None, False, False
        self.is_start_near = False

    def run(self):
        """Until the job ends, or the host is gone."""
        beats, last, beaten = 0, None, 0.0
        while not self.is_gone and self.code is None:
            if time.monotonic() - beaten > 0.5 and not self.is_silent:
                beats, beaten = beats + 1, time.monotonic()
                self.store.put(f"beat.{self.id}", beats)
            if beats == 1:
                self.store.put(f"join.{self.id}", vars(self.member))
            order = self.store.get(f"order.{self.id}")
            if order and order != last:
                last = order
                self.follow(order)
            time.sleep(0.05)

    def follow(self, order):
        """Do what the first host orders."""
        if order["do"] == "exit":
            self.store.put(f"left.{self.id}", True)
            self.said.append(order["text"])
            self.code = order["code"]
        elif order["do"] == "wait":
            self.said.append(order["text"])
        elif order["do"] == "run" and order["start"] in self.starts:
            self.is_start_near = order["is_start_near"]
        elif order["do"] == "run":
            self.starts.append(order["start"])
            self.slots.append([slot["rank"] for slot in order["slots"]])
            answer = self.answers.pop(0) if self.answers else None
            if answer == "finish":
                self.report(order, finished=True)
            elif answer == "fail":
                rank = self.slots[-1][0]
                failure = Failure(rank, time.time(), 3, "KeyError: 'tea'", "", False)
                self.report(order, failures=[failure])
        elif order["start"] in self.starts:
            self.report(order, saved=order["do"] == "save")

    def report(self, order, **values):
        """Say how the ranks have ended, once."""
        name = f"report.{order['start']}.{self.id}"
        if self.store.get(name) is None:
            self.store.put(name, Report(**values).values())


def wait_until(condition, job=None):
    """Until a condition is true; 20 s at most."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, job and job.printed
        time.sleep(0.05)


class Job:
    """A first host's coordinator, and hosts by their names."""

    def __init__(self, capsys, **plan):
        self.store, self.capsys, self.printed = Store(), capsys, ""
        self.hosts, first = [], Host(self.store.port, "a", **self.range_of(plan))
        full = {"num_hosts": 3, "min_hosts": 2, "restarts": 2, "settle": 0.3}
        own = Plan(**(full | {"timeout": 20, "meeting": "a:1"} | plan))
        hosts = JoinedHosts(self.store, SECRET, own, first=first.id)
        self.coordinator = threading.Thread(
            target=run_job, args=[hosts, own], daemon=True
        )
        self.coordinator.start()
        self.come(first)

    def range_of(self, plan):
        """The numbers of hosts that each host expects."""
        return {k: v for k, v in plan.items() if k.endswith("_hosts")}

    def come(self, host):
        """A host comes."""
        self.hosts.append(host)
        host.start()
        return host

    def add(self, name, answers=(), **member):
        """Another host comes."""
        return self.come(Host(self.store.port, name, answers, **member))

    def lines(self):
        """What the first host has printed so far."""
        self.printed += self.capsys.readouterr().err
        return self.printed.splitlines()

    def wait_for(self, text):
        """Until the first host has printed it."""
        wait_until(lambda: text in "\n".join(self.lines()), self)

    def end(self):
        """Wait for the end: exit codes of all hosts."""
        self.coordinator.join(30)
        assert not self.coordinator.is_alive(), self.printed
        for host in self.hosts:
            host.join(10)
        self.store.close()
        return [host.code for host in self.hosts]


@pytest.fixture
def job(capsys):
    """Makes jobs."""
    return lambda **plan: Job(capsys, **plan)


def test_a_job_begins_with_enough_hosts_and_takes_those_that_come(job):
    """After a save, and not counted as a restart; one too many waits."""
    job = job(restarts=0)
    b = job.add("b", ranks=2)
    job.wait_for("keras-dist: start 1: 3 ranks on 2 hosts (a, b), of 2 to 3.")
    c = job.add("c")
    job.wait_for(
        "keras-dist: start 2: host c has come; 4 ranks on 3 hosts (a, b, c), "
        "before 3 ranks on 2 hosts."
    )
    d = job.add("d")
    wait_until(lambda: d.said)
    assert "the job has 3 hosts, the most that `--nnodes` allows" in d.said[0]
    assert b.slots == [[1, 2], [1, 2]] and c.slots == [[3]] and d.starts == []
    for host in (job.hosts[0], b, c):
        host.report({"start": 1}, finished=True)
    assert job.end() == [0, 0, 0, 0]
    assert len(job.lines()) == 2


def test_the_hosts_that_are_left_go_on(job):
    """One is gone after its ranks' peers have failed; another takes its number."""
    job = job(restarts=1)
    b, c = job.add("b"), job.add("c")
    job.wait_for("start 1: 3 ranks on 3 hosts")
    c.is_gone = True
    c.join()
    lost = Failure(1, time.time(), 1, "lost connection", "", True)
    b.report({"start": 0}, failures=[lost])
    job.wait_for("has not responded")
    job.wait_for(
        "keras-dist: start 2 (restart 1 of at most 1): host c was lost; 2 ranks on 2 "
        "hosts (a, b), before 3 ranks on 3 hosts."
    )
    job.add("c", answers=["fail"])
    job.wait_for(
        "keras-dist: start 3 (restart 1 of at most 1): host c has come; 3 ranks on 3 "
        "hosts (a, b, c), before 2 ranks on 2 hosts."
    )
    assert job.end() == [3, 3, None, 3]  # the failure that was one too many
    assert any("rank 2 on c failed first" in line for line in job.lines())


def test_a_host_that_fails_three_times_is_left_out(job):
    """And the job goes on without it, until too few are left; then it takes part."""
    job = job(restarts=5, timeout=2)
    job.add("b")
    c = job.add("c", answers=["fail"] * 3)
    job.wait_for("host c has failed 3 times in 10 minutes, and is left out for as long")
    job.wait_for("start 4 (restart 3 of at most 5): rank 2 on c failed; 2 ranks on 2")
    wait_until(lambda: c.said)
    assert c.starts == [0, 1, 2] and "is left out" in c.said[0]
    b = job.hosts[1]
    b.store.put(f"stopped.{b.id}", signal.SIGTERM)
    job.wait_for("too few hosts are left; host c takes part again")
    job.wait_for("start 5 (restart 3 of at most 5): host b leaves; host c has come; ")
    c.is_gone = True
    assert job.end() == [1, 128 + signal.SIGTERM, None]
    assert "The job goes on without this host." in b.said[-1]
    last = job.lines()[-1]
    assert "Not all hosts have come within 2 s. Received: 1 of 2:3 (a); " in last
    assert "missing: 1; was there before: b; c" in last


def test_a_host_is_left_out_for_ten_minutes():
    """By a clock: failures that are long ago do not count, and it may come back."""
    now = 0.0
    left_out = LeftOut(lambda: now)
    assert [left_out.add("c") for _ in range(2)] == [False, False]
    now = 601.0
    assert not left_out.add("c") and not left_out.seconds("c")
    now = 700.0
    assert [left_out.add("c") for _ in range(2)] == [False, True]
    assert left_out.seconds("c") == 600 and not left_out.seconds("d")
    now = 1300.0
    assert not left_out.seconds("c") and not left_out.add("c")


def test_hosts_that_were_left_out_are_taken_back_in_their_order():
    """Those that are there, the one first whose time would end first."""
    now = 0.0
    left_out = LeftOut(lambda: now)
    for name in "cbd":
        now += 1
        assert [left_out.add(name) for _ in range(3)] == [False, False, True]
    assert [left_out.take_back("abc") for _ in range(3)] == ["c", "b", ""]
    assert left_out.seconds("d") and not left_out.seconds("b")
    assert not left_out.add("c")  # it may fail three times again


def test_a_training_that_would_begin_anew_is_warned_of(monkeypatch, tmp_path):
    """Where hosts come and go, and there is no `resume=`; once."""
    found = []
    for nnodes, resume in (("2:3", None), ("2:3", tmp_path), (None, None)):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        if nnodes is None:
            monkeypatch.delenv(NNODES)
        else:
            monkeypatch.setenv(NNODES, nnodes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = np.ones((8, 2)), np.ones((8, 1))
            keras_dist.dist_fit(model, *data, verbose=0, resume=resume)
        texts = [str(each.message) for each in caught]
        found.append([text for text in texts if "begins anew" in text])
    assert [len(each) for each in found] == [1, 0, 0]
    assert (
        "begins anew when a host is lost or comes. Received: --nnodes 2:3"
        in (found[0][0])
    )


_SCRIPT = """
import os, signal, sys, time

class SavedExit(SystemExit):
    "As of a rank that has saved."

def save(number, frame):
    raise SavedExit(75)

signal.signal(signal.SIGTERM, save)
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
assert os.environ["KERAS_DIST_NNODES"] == "1:2"
print("rank", rank, "of", os.environ["HOROVOD_SIZE"], "start", start, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


@pytest.fixture
def end(tmp_path):
    """A file that ends the ranks of the script, also after a test that has failed."""
    yield tmp_path / "end"
    (tmp_path / "end").touch()


def test_commands_come_and_leave(tmp_path, end):
    """Real ones, on one machine: SIGTERM lets one leave, and then one more comes."""
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(_SCRIPT)
    words = ["--nnodes", "1:2", "--rdzv", f"127.0.0.1:{free_port()}", script, end]
    first, second = (command(*words, mark=mark) for _ in range(2))
    outputs = [process.stdout.readline() for process in (first, second)]
    assert sorted(outputs) == [
        f"[{rank}] rank {rank} of 2 start 0\n" for rank in (0, 1)
    ]
    if outputs[0].startswith("[1]"):
        first, second = second, first
    second.send_signal(signal.SIGTERM)
    assert first.stdout.readline() == "rank 0 of 1 start 1\n"
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 128 + signal.SIGTERM
    assert errors.endswith("The job goes on without this host.\n"), errors
    third = command(*words, mark=mark)
    assert third.stdout.readline() == "[1] rank 1 of 2 start 2\n"
    assert first.stdout.readline() == "[0] rank 0 of 2 start 2\n"
    end.touch()
    assert third.wait(20) == 0
    _, errors = first.communicate(timeout=20)
    assert first.returncode == 0, errors
    lines = errors.splitlines()
    assert lines[0].endswith("of 1 to 2.") and len(lines) == 3, errors
    assert "start 2: host " in lines[1] and "leaves; 1 rank on 1 host" in lines[1]
    assert "start 3: host " in lines[2] and "has come; 2 ranks" in lines[2]
    assert left_behind(mark) == []


def test_hosts_are_named_by_a_script(tmp_path, capsys):
    """By lines with slots or without; a script that fails changes nothing."""
    named = tmp_path / "named"
    hosts = DiscoveredHosts(f"cat {named}", 4)
    named.write_text("a:2\nb\n\ndown:1\n")
    hosts.look()
    assert hosts.slots() == {"a": 2, "b": 4, "down": 1} and hosts.error == ""
    named.write_text("a two\n")
    hosts.look()
    assert hosts.slots() == {"a": 2, "b": 4, "down": 1}
    assert "Received: 'a two'" in hosts.error
    hosts.look()
    error = capsys.readouterr().err
    assert error.count("must print a line HOST:SLOTS") == 1, error
    named.write_text("")
    hosts.look()
    assert hosts.slots() == {} and hosts.error == ""
    named.unlink()
    hosts.look()
    assert "ended with exit code 1" in capsys.readouterr().err


# Stands in for ssh: connects to all hosts but one, and says so.
_SSH = """#!/bin/sh
echo $2 >> $0.calls
test $2 != down || exit 255
test $2 != off || { sleep 1.5; exit 255; }
exec sh -c "$3"
"""


@pytest.fixture
def by_ssh(tmp_path, monkeypatch):
    """Runs a job by a stand-in for ssh: hosts, its plan, and the words of its ranks."""
    program = tmp_path / "ssh"
    program.write_text(_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(ssh, "_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(ssh, "_JOIN_SECONDS", 2.0)
    monkeypatch.setattr(ssh, "_LOST_JOIN_SECONDS", 0.5)

    def run_hosts(hosts, plan, *words):
        command = Command("program", ["sh", "-c", *words], {})
        own = Ssh([str(program)], "127.0.0.1")
        return ssh.run_by_ssh(command, hosts, own, plan)

    run_hosts.calls = tmp_path / "ssh.calls"
    return run_hosts


def test_hosts_by_ssh_that_answer_take_part(by_ssh, capfd):
    """Those that do not are tried again and again, and no start waits for them."""
    plan = Plan(num_hosts=4, min_hosts=2, restarts=0, timeout=30, settle=2.0)
    hosts = NamedHosts({"a": 2, "down": 1, "off": 1, "b": 1})
    assert by_ssh(hosts, plan, "echo rank $HOROVOD_RANK on $HOROVOD_HOSTNAME") == 0
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == [
        "[0] rank 0 on a",
        "[1] rank 1 on a",
        "[2] rank 2 on b",
    ]
    start = "keras-dist: start 1: 3 ranks on 2 hosts (a, b), of 2 to 4."
    assert printed.err.splitlines() == [start]
    calls = by_ssh.calls.read_text().split()
    assert calls.count("down") > 1 and calls.count("a") == calls.count("b") == 1


def test_a_host_by_ssh_keeps_its_agent_from_start_to_start(by_ssh, capfd, tmp_path):
    """Where one of its ranks fails; and one whose agent is killed gets another one."""
    plan = Plan(num_hosts=2, restarts=3, timeout=30, is_announced=True)
    script = f"""
        start=${{KERAS_DIST_RESTART:-0}}; cd {tmp_path}; touch rank.$start.$HOROVOD_RANK
        case $start.$HOROVOD_RANK in
            0.1) exit 3;;
            1.0) until test -e rank.1.1; do sleep 0.1; done; kill -9 $PPID;;
            2.*) exit 0;;
        esac
        sleep 60
    """
    assert by_ssh(NamedHosts({"a": 1, "b": 1}), plan, script) == 0
    errors = capfd.readouterr().err
    assert "rank 1 on b failed first" in errors
    assert "the agent on a was killed, or the connection to it was lost" in errors
    assert "while rank 0 ran: exit code 137." in errors
    calls = by_ssh.calls.read_text().split()
    assert calls.count("a") == 2 and calls.count("b") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2:1", "--rdzv", "localhost:1"], "At least one host"),
        (["--nnodes", "two", "--rdzv", "localhost:1"], "For example: --nnodes 2:4"),
        (["--nnodes", "1:", "--rdzv", "localhost:1"], "For example: --nnodes 2:4"),
        (["--host-discovery-script", "x"], "need `--nnodes MIN:MAX`"),
        (["-H", "a:1", "--nnodes", "1:2", "-np", 1], "need `--nnodes MIN:MAX`"),
        (["-H", "a:1", "--nnodes", "2:1"], "At least one host is needed"),
        (
            ["--host-discovery-script", "echo a", "--nnodes", "1:2", "-H", "a:1"],
            "`--host-discovery-script` without `-H`",
        ),
        (
            ["-H", "a:1", "--nnodes", "1:2", "--ssh", "false", "--rdzv-timeout", 0],
            "Too few hosts are there. Received: 0 of 1:2 (); missing: a, not reached",
        ),
    ],
)
def test_what_cannot_be_elastic_is_named(words, message):
    """Before anything is started."""
    done = run(*words, "-m", "this")
    assert done.returncode == 1
    assert message in done.stderr and "Received" in done.stderr
