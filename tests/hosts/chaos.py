"""Random faults while three hosts of our own train: `make chaos COUNT=50 SEED=1`.

    chaos.py COUNT SEED [WAY ...]

A third of the faults for each way to start a job: `meet` (the same command on each
host, two to three of them), `ssh` (two to three hosts of `-H`) and `fixed` (three).
`meet+spare`, `meet+tls+spare`, `ssh+tls` and the like add options to them; with spare
processes most faults happen when all hosts have one. Commands that end are started
again, as systemd does it. No disk is shared. The job has to end with exit code 0, and
with the weights of the same script with plain `model.fit`: hosts that come and go do
not change the training. Where the number of ranks has never changed, it has to end with
the bits of a training that nobody has disturbed.
"""

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import network
import numpy as np
from chaos_faults import FAULTS, LOSSES, RANK_FAULTS, processes_of_ranks
from chaos_steps import RANKS, SAVE_STEPS, steps_in

SCRIPT = "tests/hosts/cnn.py"
WAYS = ("meet", "ssh", "fixed")
PAUSE = "0.3"

# Seconds in which a job has to make new steps after the last fault, and to end.
LIMIT = 240.0


def say(text):
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


class Job:
    """A training on hosts a, b and c; by ssh it is started on d.

    Args:
        net: The hosts.
        folder: A folder that all hosts see, for what the test looks at.
        way: How it is started.
        epochs: How long it is.
    """

    def __init__(self, net, folder, way, epochs):
        self.net, self.folder, self.name, self.epochs = net, folder, way, epochs
        self.way, *self.options = way.split("+")
        self.hit, self.hit_spares = 0, 0  # ranks that got a signal
        self.log, self.pace = folder / "log", folder / "pace"
        self.commands = "abc" if self.way == "meet" else "d"
        self.running, self.over, self.files = {}, set(), []
        self.expected = set()  # exit codes of commands that the faults explain
        folder.mkdir()
        self.pace.write_text(PAUSE)

    def words(self, host):
        """The command of a host, the same each time."""
        options = {
            "meet": ["--nnodes", "2:3", "--rdzv", "a:29400"],
            "ssh": ["--nnodes", "2:3", "-H", "a:1,b:1,c:1"],
            "fixed": ["-H", "a:1,b:1,c:1"],
        }[self.way]
        if self.way == "meet" and host != "a":
            options = [*options, "--node-rank", "abc".index(host)]
        options = [*options, *(f"--{option}" for option in self.options)]
        own = [self.folder / "w.npy", self.epochs, self.log, self.pace, "/tmp/resume"]
        return [*network.LAUNCH, *options, "--max-restarts", 1000, SCRIPT, *own]

    def look(self):
        """Start each command that does not run, on a host that is there."""
        for host in self.commands:
            process = self.running.get(host)
            code = None if process is None else process.poll()
            if code is not None:
                del self.running[host]
                self.note_end(host, code)
            is_new = host not in self.running and self.net.is_on(host)
            if is_new and not self.over:
                self.start(host)

    def note_end(self, host, code):
        """Say how a command has ended; it is an error where no fault explains it."""
        say(f"  the command on {host} has ended with {code}: {self.last_line(host)}")
        if code == 0:
            self.over.add(host)
        elif code not in self.expected:
            raise RuntimeError(
                f"{self.name}: {host}: an exit code that nothing explains"
            )

    def start(self, host):
        """Start the command of a host; its output goes to a file."""
        path = self.folder / f"{len(self.files):03}.{host}.txt"
        self.files.append(path)
        words = ["bash", "-c", 'exec "$@" > "$0" 2>&1', path, *self.words(host)]
        env = {"KERAS_DIST_SECRET": "a secret of these tests"}
        self.running[host] = self.net.start(host, words, env=env)

    def last_line(self, host):
        """What the last command of a host has said last."""
        path = [path for path in self.files if path.suffixes[0] == f".{host}"][-1]
        lines = [x for x in path.read_text().splitlines() if "keras-dist: " in x]
        return lines[-1] if lines else ""

    def steps(self):
        """For each step that was made: the start, the step, and the number of ranks."""
        return steps_in(self.log)

    def wait(self, condition, what, seconds=LIMIT):
        """Wait for a condition, and start commands again meanwhile."""
        begin = time.monotonic()
        while not condition():
            self.look()
            if time.monotonic() - begin > seconds:
                raise TimeoutError(f"{self.name}: waited {seconds:g} s for {what}")
            time.sleep(0.1)

    def pause(self, seconds):
        """Let so many seconds pass."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "nothing", seconds + LIMIT)

    def wait_for_steps(self, count):
        """Until one start has made so many new steps."""
        seen = len(self.steps())

        def is_there():
            new = [start for start, _, _ in self.steps()[seen:]]
            return self.over or (bool(new) and new.count(new[-1]) >= count)

        self.wait(is_there, f"{count} new steps")
        if self.over:
            raise RuntimeError(f"{self.name}: it was over before all faults were tried")

    def wait_for_spares(self):
        """With `--spare`, until each host that has a rank has a spare process, too."""

        def are_there():
            found = [processes_of_ranks(self.net, host) for host in "abc"]
            return any(ranks for ranks, _ in found) and all(
                idle for ranks, idle in found if ranks
            )

        if "spare" in self.options:
            self.wait(are_there, "spare processes")

    def finish(self):
        """Let it come to its end: all commands end with exit code 0."""
        self.pace.write_text("0")
        self.wait(lambda: len(self.over) == len(self.commands), "the end")


def disturb(job, count, generator):
    """Let faults happen, each after some steps, or while the ranks start again."""
    kinds = [kind for kind, fault in FAULTS.items() if job.way in fault.ways]
    last = "host lost"
    for number in range(count):
        kind = generator.choice(kinds)
        is_calm = {kind, last} & LOSSES or generator.random() < 0.7
        if is_calm:
            has_losses = kind in LOSSES or last in LOSSES
            job.wait_for_spares()
            job.wait_for_steps(SAVE_STEPS + 2 if has_losses else 1)
            job.pause(generator.uniform(0, 2))
        else:
            job.pause(generator.uniform(0, 12))
        host, fault = generator.choice("abc"), FAULTS[kind]
        job.expected = fault.codes(job.way) | FAULTS[last].codes(job.way)
        step = job.steps()[-1][1] if job.steps() else 0
        moment = f"in step {step}" if is_calm else "at once"
        say(f"{job.name} {number + 1}: {kind} {host}, {moment}")
        before, (ranks, _) = job.hit, processes_of_ranks(job.net, host)
        fault.happen(job, host, generator)
        if kind in RANK_FAULTS:
            say(f"  {job.hit - before} ranks got the signal")
            assert job.hit > before or not (ranks and is_calm)
        last = kind
    job.wait_for_steps(1)
    say(f"{job.name}: {job.hit} ranks got a signal; {job.hit_spares} had been spares")


def check_steps(job):
    """Each start goes on where the last checkpoint was, and makes step after step."""
    steps, lost = job.steps(), []
    for (start, step, _), (other, following, _) in zip(steps, steps[1:], strict=False):
        if start == other:
            assert following == step + 1, (step, following)
        else:
            lost.append(step + 1 - following)
    starts = len({start for start, _, _ in steps})
    say(f"{job.name}: {starts} starts; steps made again: {lost}")
    # A checkpoint may be on its way while the ranks are ended.
    assert max(lost, default=0) <= 2 * SAVE_STEPS, lost


def alone(job):
    """The weights and the accuracy of plain Keras."""
    path = job.folder / "alone.npy"
    words = [sys.executable, SCRIPT, path, job.epochs]
    done = job.net.run("a", words, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return np.load(path), float(done.stdout.split()[-1])


def undisturbed_bits(job):
    """The weights of a training on the same hosts without faults."""
    quiet = Job(job.net, job.folder / "quiet", "fixed", job.epochs)
    quiet.pace.write_text("0")
    quiet.wait(lambda: quiet.over, "the undisturbed training", 2 * LIMIT)
    return np.load(quiet.folder / "w.npy")


def check_end(job):
    """The weights, and the accuracy, are those of a training without faults."""
    check_steps(job)
    found = np.load(job.folder / "w.npy")
    texts = [path.read_text() for path in job.files]
    accuracy = float("".join(texts).rpartition("accuracy ")[2].split()[0])
    expected, undisturbed = alone(job)
    difference = np.abs(found - expected).max()
    say(f"{job.name}: differs by {difference:.1e}; accuracy {accuracy}, {undisturbed}")
    assert difference < 1e-4
    assert abs(accuracy - undisturbed) <= 0.02
    if {size for _, _, size in job.steps()} == {RANKS}:
        for name in "abc":
            job.net.run(name, ["rm", "-rf", "/tmp/resume"])
        assert (undisturbed_bits(job) == found).all()
        say(f"{job.name}: the bits of an undisturbed training")
    for name in "abcd":
        left = job.net.run(name, ["ls", "/tmp"]).stdout
        assert "keras_dist." not in left, (name, left)
        assert not job.net.processes(name, SCRIPT)
        assert not any(processes_of_ranks(job.net, name))


def main(count, seed, *ways):
    """Try so many faults."""
    count, seed, ways = int(count), int(seed), ways or WAYS
    folder = Path(tempfile.mkdtemp(prefix="keras_dist_chaos."))
    say(f"{count} faults, SEED={seed}, {', '.join(ways)}; outputs in {folder}")
    with network.hosts("abcd", shared=[folder]) as net:
        for number, way in enumerate(ways):
            share = (count + number) // len(ways)
            # A wait for spare processes takes some 80 steps.
            per_fault = 10 if "spare" in way else 2
            job = Job(net, folder / way, way, epochs=per_fault * share + 3)
            disturb(job, share, random.Random(f"{seed} {way}"))
            job.finish()
            check_end(job)
            net.restore()
            for name in "abc":
                net.run(name, ["rm", "-rf", "/tmp/resume"])
    shutil.rmtree(folder)
    say(f"{count} faults, SEED={seed}: all is well")


if __name__ == "__main__":
    main(*sys.argv[1:])
