"""`hvd.elastic` of `keras_dist.horovod` on hosts that come and go."""

import re

import pytest
from network import LAUNCH, until

SCRIPT, EPOCHS = "tests/hosts/elastic_script.py", 12

pytestmark = pytest.mark.long


class Training:
    """A training that looks in a file for its hosts."""

    def __init__(self, net, folder, hosts):
        folder.mkdir()
        self.net, self.folder, self.named = net, folder, folder / "named"
        self.name(*hosts)

    def start(self, *words):
        """Start a launcher on the first host."""
        self.launcher = self.net.start("a", words)

    def name(self, *hosts):
        """Name the hosts that there are from now on."""
        self.named.write_text("".join(f"{host}:1\n" for host in hosts))

    def sizes(self):
        """Numbers of ranks with which each epoch was trained, in order."""
        return [[int(line.split()[0]) for line in each] for each in self.lines()]

    def lines(self):
        """For each epoch, the lines that the script has written."""
        found = {
            int(path.suffix[1:]): path.read_text().splitlines()
            for path in self.folder.glob("epoch.*")
        }
        return [found[epoch] for epoch in sorted(found)]

    def wait_for(self, ranks):
        """Until the last epoch was trained by so many ranks."""

        def is_there():
            sizes = self.sizes()
            if self.launcher.poll() is not None:
                raise RuntimeError("".join(self.launcher.communicate()))
            return bool(sizes) and sizes[-1][-1:] == [ranks]

        try:
            until(is_there, f"an epoch of {ranks} ranks", 150)
        except TimeoutError as error:
            self.launcher.kill()
            printed = self.launcher.communicate()
            raise TimeoutError(f"{error}; {self.sizes()}; {printed}") from None

    def end(self, ranks):
        """All epochs were trained, by ranks that are equal; and what was printed."""
        stdout, stderr = self.launcher.communicate(timeout=200)
        assert self.launcher.returncode == 0, stdout + stderr
        ends = re.findall(r"end: rank (\d) of (\d), (\d+) epochs, (\d) equal", stdout)
        assert sorted(ends) == [
            (str(rank), str(ranks), str(EPOCHS), str(ranks)) for rank in range(ranks)
        ], stdout
        assert stdout.count(f"equal, {0.01 * ranks:.2f}") == ranks
        assert len(self.sizes()) == EPOCHS
        print(self.sizes())
        return stderr


def test_keras_dist_run_gains_a_host_and_loses_another(net, shared):
    """All ranks are started anew, and go on with the last commit."""
    training = Training(net, shared / "keras_dist", "ab")
    options = ["--host-discovery-script", f"cat {training.named}"]
    words = [*LAUNCH, *options, "--nnodes", "1:3", "--restarts", 3]
    training.start(*words, SCRIPT, training.folder)
    training.wait_for(2)
    training.name("a", "b", "c")
    training.wait_for(3)
    net.power_off("b")
    training.name("a", "c")
    training.wait_for(2)
    errors = training.end(2)
    assert "host c has come" in errors and "host b" in errors
    assert all(len(sizes) <= 2 for sizes in training.sizes())
    # What a commit has left behind goes with the launcher, at least on its host.
    done = net.run("a", ["sh", "-c", "ls -d /tmp/keras_dist.*.lasting.*"])
    assert done.stdout == ""
