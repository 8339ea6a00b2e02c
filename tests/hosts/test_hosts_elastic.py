"""A training loses a host and gains one, without ssh and with it."""

import signal
import sys
import time

import numpy as np
import pytest
from network import LAUNCH, until
from test_hosts_faults import STUB, all_there, ended
from test_rdzv import SECRET
from test_training import TRAIN, assert_equal, found_of


class Training:
    """A training of a rank on each of three hosts, of which two are enough."""

    def __init__(self, net, folder, resume):
        self.net, self.folder, self.sizes = net, folder, folder / "sizes"
        self.sizes.mkdir(parents=True)
        self.commands = []
        self.env = {"RESUME": str(resume), "SIZES": str(self.sizes)}
        self.env |= {"PAUSE": "1", **SECRET}

    def start(self, host, *options):
        """Start a command on a host."""
        words = [*LAUNCH, *options, "--nnodes", "2:3", "--max-restarts", 2]
        words += [TRAIN, self.folder / "w.npy"]
        self.commands.append(self.net.start(host, words, env=self.env))
        return self.commands[-1]

    def last(self):
        """The last step, and how many ranks have made it."""
        steps = [int(path.name) for path in self.sizes.iterdir()]
        path = self.sizes / str(max(steps, default=0))
        return max(steps, default=0), int(path.read_text() or 0) if steps else 0

    def wait_for(self, step, size, seconds=120):
        """Until so many ranks have made this step, or a later one."""

        def is_there():
            last, ranks = self.last()
            return last >= step and ranks == size

        try:
            until(is_there, f"step {step} of {size} ranks", seconds)
        except TimeoutError as error:
            for process in self.commands:
                process.kill()
            printed = [process.communicate()[1] for process in self.commands]
            raise TimeoutError(f"{error}; now {self.last()}; {printed}") from None
        return self.last()[0]

    def assert_equal(self, net):
        """The weights are those of plain Keras, with the batch of each step."""
        path = self.folder / "alone.npy"
        done = net.run("d", [sys.executable, TRAIN, path, self.sizes])
        assert done.returncode == 0, done.stderr
        assert_equal(self.folder / "w.npy", np.load(path))
        found = [int(path.read_text()) for path in self.sizes.iterdir()]
        assert set(found) == {2, 3}


@pytest.mark.long
@pytest.mark.parametrize("way", ["meet", "ssh"])
def test_a_training_loses_a_host_and_gains_it_back(net, shared, way):
    """Power off, and on again; the result is that of plain Keras with these batches.

    Hosts that meet keep the checkpoints each in a folder of its own, and that of the
    host without power is lost.
    """
    folder = shared / f"elastic.{way}"
    own = "/tmp/elastic"  # another one on each host
    training = Training(net, folder, folder / "resume" if way == "ssh" else own)
    options = ["-H", "a:1,b:1,c:1"] if way == "ssh" else ["--rdzv", "a:29400"]
    others = []
    if way == "meet":  # the first host last, so that it finds all of them there
        last = training.start("c", *options, "--node-rank", 2)
        others = [training.start("b", *options, "--node-rank", 1)]
    first = training.start("a", *options)
    training.wait_for(5, 3)
    net.power_off("c")
    cut = time.monotonic()
    step = training.last()[0]
    training.wait_for(step, 2)
    lost_seconds = time.monotonic() - cut
    net.power_on("c")
    if way == "meet":
        assert last.wait(30)  # ended with its host
        others.append(training.start("c", *options, "--node-rank", 2))
    training.wait_for(step, 3)
    stdout, stderr = first.communicate(timeout=180)
    lines = [line for line in stderr.splitlines() if "keras-dist: " in line]
    assert first.returncode == 0, stderr
    for other in others:
        printed = "".join(other.communicate(timeout=30))
        assert other.returncode == 0, printed
        stdout += printed
    print(f"{way}: {lost_seconds:.1f} s from the power cut to the next new step")
    assert lines[0].startswith("keras-dist: start 1: 3 ranks on 3 hosts (a, b, c)")
    assert lines[1] == "keras-dist: host c has not responded for 15 s (rank 2)."
    assert lines[2] == (
        "keras-dist: start 2 (restart 1 of at most 2): host c was lost; 2 ranks on 2 "
        "hosts (a, b), before 3 ranks on 3 hosts."
    )
    assert lines[3] == (
        "keras-dist: start 3 (restart 1 of at most 2): host c has come; 3 ranks on 3 "
        "hosts (a, b, c), before 2 ranks on 2 hosts."
    )
    assert len(lines) == 4, lines
    assert found_of(stdout, 3) == [(0, 1, host) for host in "abc"]
    changed = [line for line in stdout.splitlines() if "since the checkpoint" in line]
    print("\n".join(changed))
    for ranks, line in zip(("3 → 2", "2 → 3"), changed, strict=True):
        batches = " → ".join(str(8 * int(size)) for size in ranks.split(" → "))
        assert f"ranks {ranks}, global batch {batches} " in line
    training.assert_equal(net)
    assert lost_seconds < 60


@pytest.mark.long
def test_a_discovery_script_adds_hosts_and_drops_them(net, shared):
    """And a host whose agent is killed three times is left out."""
    folder, named = shared / "discovery", shared / "named"
    named.write_text("a:1\n")
    options = ["--host-discovery-script", f"cat {named}", "--nnodes", "1:3"]
    words = [*LAUNCH, *options, "--restarts", 5, STUB, folder, "save"]
    launcher = net.start("a", words)
    all_there(folder, 1)
    named.write_text("a:1\nb:2\n")
    all_there(folder, 3, start=1)
    named.write_text("b:2\nc:1\n")
    all_there(folder, 3, start=2)
    assert (folder / "saved.0").exists() and (folder / "saved.2").exists()
    for start in (3, 4, 5):
        agents = net.processes("c", "-m keras_dist host-agent")
        min(agents, key=lambda agent: agent.create_time()).kill()  # not its reaper
        all_there(folder, 3 if start < 5 else 2, start=start)
    assert not (folder / "there.5.2").exists()
    net.signal_command(launcher, signal.SIGTERM)
    code, lines, _ = ended(launcher)
    assert code == 128 + signal.SIGTERM
    starts = [line for line in lines if "start " in line]
    assert "host b has come; 3 ranks on 2 hosts (a, b)" in starts[1]
    assert "host a leaves; host c has come; 3 ranks on 2 hosts (b, c)" in starts[2]
    assert "host c was lost; 3 ranks on 2 hosts (b, c)" in starts[3]
    assert starts[5].endswith("2 ranks on 1 host (b), before 3 ranks on 2 hosts.")
    assert any("host c has failed 3 times" in line for line in lines)
    assert "the ranks have saved" in lines[-1]
