"""More launches and longer faults on hosts, for `make hosts`."""

import random
import signal
import sys
import time

import pytest
from harness.launching import HOROVODRUN, RUN, allow, until, wait_for_files
from harness.network import own_lines
from harness.on_hosts import (
    STUB,
    TRAIN,
    all_there,
    assert_equal,
    assert_trained,
    count_ranks,
    ended,
    found_of,
    kill_command,
    meet,
    outputs,
)


@pytest.mark.parametrize("hosts", ["a:1,b:1", "a:2,b:2", "a:1,b:1,c:1"])
@pytest.mark.parametrize("launcher", ["keras-dist run", "horovodrun"])
def test_both_launchers_train_as_one_process(net, shared, alone, launcher, hosts):
    """On two hosts with one and two ranks, and on three."""
    path = shared / "launched.npy"
    words = [*RUN, "-H", hosts, TRAIN, path]
    if launcher == "horovodrun":
        words = [*HOROVODRUN, "--disable-cache", "-np", count_ranks(hosts), "-H", hosts]
        words += [sys.executable, TRAIN, path]
    assert_trained(net.run("a", words, timeout=300), hosts, path, alone)


@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_hosts_that_meet_start_again_where_a_rank_is_killed(net, shared, alone, hosts):
    """The first cause is on the first host's screen; the weights are the same."""
    path, last = shared / "met.npy", len(hosts) - 1
    variables = {"KILL": str(last), "RESUME": str(shared / f"met.{hosts}")}
    words = ["--restarts", 1, TRAIN, path]
    stdout, stderr = outputs(meet(net, hosts, *words, **variables))
    assert f"rank {last} on {hosts[last]} failed first" in stderr
    assert "SIGKILL" in stderr and "start 2 of at most 2" in stderr
    assert found_of(stdout, len(hosts)) == [(0, 1, host) for host in hosts]
    assert_equal(path, alone(len(hosts)))


@pytest.fixture(scope="module")
def undisturbed(running, shared):
    """What both ranks of a training without faults print."""
    done = running.run("a", [*RUN, "-H", "a:1,b:1", TRAIN, shared / "w.npy"])
    assert done.returncode == 0, done.stderr
    return lines_found(done.stdout)


def lines_found(stdout):
    """What both ranks of a training print about their weights."""
    lines = stdout.replace("[1] ", "").splitlines()
    return sorted(line for line in lines if "found" in line)


class Training:
    """A training of two ranks on two hosts, with a folder for its checkpoints."""

    def __init__(self, net, folder, *options, pause):
        self.net, self.folder, self.options = net, folder, options
        steps = folder / "steps"
        self.process = self.start(STEPS=str(steps), PAUSE=str(pause))
        wait_for_files(steps / "0.5", steps / "1.5", seconds=120)

    def start(self, **variables):
        """Start the command, the same each time."""
        words = [*RUN, *self.options, "-H", "a:1,b:1", TRAIN, self.folder / "w.npy"]
        return self.net.start(
            "a", words, RESUME=str(self.folder / "resume"), **variables
        )

    def end(self, seconds=120):
        """Wait for the end: exit code, output, and the launcher's last lines."""
        stdout, stderr = self.process.communicate(timeout=seconds)
        return self.process.returncode, stdout, own_lines(stderr)

    def resumed(self):
        """What both ranks print when the same command is started again."""
        self.process = self.start()
        code, stdout, lines = self.end()
        assert code == 0, lines
        return lines_found(stdout)


def test_a_rank_that_is_stopped_is_named_with_exit_code_70(net, folder):
    """By the stall limit; its host answers all the time."""
    training = Training(net, folder, "--stall-limit", "15", pause=0.5)
    _, rank = net.processes("b", "monitor/", TRAIN)  # behind its parent
    rank.send_signal(signal.SIGSTOP)
    code, _, lines = training.end()
    assert code == 70, lines
    assert any("Rank 1 is missing" in line for line in lines), lines


_SAVED = 143, "the ranks ended together"
_LOST = 1, "has not responded for 15 s (rank 1)"


@pytest.mark.parametrize(
    ("fault", "expected"), [("sigterm", _SAVED), ("link", _LOST), ("power", _LOST)]
)
def test_a_job_that_has_ended_goes_on_to_the_same_bits(
    net, folder, undisturbed, fault, expected
):
    """By SIGTERM in the middle of a long step, or with a host, which is named.

    It ends within 20 s, also in the middle of a collective.
    """
    pause = 4 if fault == "sigterm" else 0.5
    training = Training(net, folder, "--restarts", "3", pause=pause)
    begin = time.monotonic()
    if fault == "sigterm":
        net.signal_command(training.process, signal.SIGTERM)
    elif fault == "link":
        net.link("b", is_up=False)
    else:
        net.power_off("b")
    code, _, lines = training.end()
    assert time.monotonic() - begin < allow(20)
    assert code == expected[0] and expected[1] in lines[0], lines
    if fault == "link":
        net.link("b", is_up=True)
    elif fault == "power":
        net.power_on("b")
    assert training.resumed() == undisturbed


@pytest.mark.parametrize("seed", range(20))
def test_random_faults_end_the_job_with_their_cause(net, folder, seed):
    """A rank or a host is killed at random: nothing hangs, and nothing is left."""
    generator = random.Random(seed)
    way, victim = generator.choice(["ssh", "meet"]), generator.choice("abc")
    kind = generator.choice(["rank", "command", "power"])
    words = [STUB, folder, "wait"]
    if way == "ssh":
        jobs = {"d": net.start("d", [*RUN, "-H", "a:1,b:1,c:1", *words])}
    else:
        jobs = dict(zip("abc", meet(net, "abc", *words), strict=True))
    all_there(folder, ranks=3)
    time.sleep(generator.uniform(0, 2))
    if kind == "rank":
        net.processes(victim, "monitor/", STUB)[0].kill()
    elif kind == "power":
        net.power_off(victim)
        jobs.pop(victim, None)
    elif way == "meet":
        net.signal_command(jobs.pop(victim), signal.SIGKILL)
    else:
        kill_command(net, victim)
    begin, said = time.monotonic(), {}
    for name, job in jobs.items():
        code, lines, _ = ended(job)
        assert code, (way, kind, victim)
        said[name] = "\n".join(lines)
    assert time.monotonic() - begin < allow(25), (way, kind, victim)
    # Where the first host is lost, with its screen, the others know its address alone.
    is_first = way == "meet" and victim == "a" and kind != "rank"
    cause = "The first host was lost" if is_first else f" {victim}"
    if kind == "rank":
        cause = f"on {victim} failed first"
    assert all(cause in text for text in said.values()), (way, kind, victim, said)
    for name in "abc":
        if net.is_on(name):
            until(lambda own=name: not net.processes(own, STUB), "the ranks' end", 10)
