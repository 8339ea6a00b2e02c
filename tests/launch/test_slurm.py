"""Ranks under a real SLURM; left out, with the reason, where it is not installed."""

import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import slurm

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

HOSTS = Path(__file__).parents[1] / "hosts"
RUN = [sys.executable, "-m", "keras_dist", "run"]
TRAIN, STUB = HOSTS / "train.py", HOSTS / "stub.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of SLURM on this machine."""
    with slurm.nodes(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def there(folder, ranks=2, seconds=60):
    """Wait until all ranks of the stub are there."""
    begin = time.monotonic()
    while not all((folder / f"there.0.{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() - begin < seconds
        time.sleep(0.1)


# Options of srun for two tasks, the command of each, and how many ranks a node gets.
# A step with PMIx is on one node: on two slurmd of one machine it was not started.
WAYS = {
    "keras-dist run": (["-N2"], RUN, 1),
    "keras-dist run -np 2": (["-N2"], [*RUN, "-np", 2], 2),
    "python": (["-N2"], [sys.executable], 1),
    "python by PMIx": (["-N1", "--overcommit", "--mpi=pmix"], [sys.executable], 2),
}


@pytest.mark.parametrize(
    "way",
    [
        way if way == "keras-dist run" else pytest.param(way, marks=pytest.mark.long)
        for way in WAYS
    ],
)
def test_srun_trains_as_one_process(cluster, tmp_path, way):
    """One task a node with all its ranks; and two tasks that are ranks themselves."""
    alone, path = tmp_path / "alone.npy", tmp_path / "weights.npy"
    options, words, count = WAYS[way]
    size = count * int(options[0][-1])
    assert cluster.run(sys.executable, TRAIN, alone, size).returncode == 0
    done = cluster.run("srun", "-n2", *options, *words, TRAIN, path)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if "found " in line]
    found = sorted(json.loads(line.partition("found ")[2]) for line in found)
    ranks = [[rank, rank % count, count] for rank in range(size)]
    assert [each[:3] for each in found] == ranks
    assert len({each[4] for each in found}) == 1
    np.testing.assert_allclose(np.load(path), np.load(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_tasks_that_are_ranks_save_at_sigusr1_and_go_on(cluster, tmp_path):
    """As under a launcher: exit code 75, and the weights of an undisturbed training."""
    words = ["srun", "-N2", "-n2", "-J", "saving", sys.executable, TRAIN]
    steps, path = tmp_path / "steps", tmp_path / "weights.npy"
    variables = {"RESUME": str(tmp_path / "resume")}
    process = cluster.start(*words, path, **variables, STEPS=str(steps), PAUSE="1")
    begin = time.monotonic()
    while not all((steps / f"{rank}.3").exists() for rank in (0, 1)):
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() - begin < 120
        time.sleep(0.1)
    assert cluster.run("scancel", "-s", "USR1", "-n", "saving").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors.decode()
    assert not path.exists()
    assert cluster.run(*words, path, **variables).returncode == 0
    alone = tmp_path / "alone.npy"
    assert cluster.run(sys.executable, TRAIN, alone, 2).returncode == 0
    np.testing.assert_allclose(np.load(path), np.load(alone), rtol=1e-4, atol=1e-6)


def test_several_tasks_on_a_node_are_an_error(cluster, tmp_path):
    """Each would start ranks on the devices of all; it says what to call."""
    done = cluster.run("srun", "-N2", "-n4", "--overcommit", *RUN, "true")
    assert done.returncode == 1
    assert "Received: 2 tasks on this node." in done.stderr


@pytest.mark.long
def test_tasks_are_ranks_without_a_secret(cluster):
    """By SLURM's variables alone: `srun -N2 -n2 python script.py`."""
    code = "import keras_dist; print(keras_dist.gather(keras_dist.init().size))"
    words = ["srun", "-N2", "-n2", sys.executable, "-c", code]
    done = cluster.run(*words, KERAS_DIST_SECRET="")
    assert done.returncode == 0 and done.stdout.count("[2, 2]") == 2, done.stderr


def test_a_job_saves_at_sigusr1(cluster, tmp_path):
    """Exit code 75 on all nodes, as `scontrol requeue` in the job's script wants."""
    folder = tmp_path / "ranks"
    words = ["srun", "-N2", "-n2", "-J", "saving", *RUN, STUB, folder, "save"]
    process = cluster.start(*words)
    there(folder)
    assert cluster.run("scancel", "-s", "USR1", "-n", "saving").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors.decode()
    assert f"ended by {signal.SIGUSR1.name} on n" in errors.decode()
    assert "the ranks have saved" in errors.decode()
    assert (folder / "saved.0").exists() and (folder / "saved.1").exists()


@pytest.mark.long
def test_srun_checks_both_nodes_on_one_screen(cluster, tmp_path):
    """Each task takes part, and the first one alone shows and writes what was seen."""
    path = tmp_path / "found.json"
    words = [sys.executable, "-m", "keras_dist", "check"]
    done = cluster.run("srun", "-N2", "-n2", *words, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✔ versions") == 1
    results = {r["name"]: r for r in json.loads(path.read_text())["results"]}
    assert results["connect"]["seen"].startswith("2 ranks over Gloo")
