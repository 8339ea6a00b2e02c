"""Ranks under a real SLURM; left out, with the reason, where it is not installed."""

import functools
import json
import os
import sys
import tempfile

import numpy as np
import pytest
from harness import slurm
from harness.launching import RUN, launch, until, wait_for_files

from keras_dist.clusters import find_place
from keras_dist.comm.rendezvous import decode_secret, encode_secret

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

TRAIN, STUB = "tests/hosts/train.py", "tests/hosts/stub.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of SLURM on this machine."""
    with slurm.nodes(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@functools.cache
def weights_of_one_process(ranks):
    """The weights of plain Keras, with the batch of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        launch([TRAIN, f"{folder}/alone.npy", ranks], check=True)
        return np.load(f"{folder}/alone.npy")


def assert_equals_one_process(path, ranks=2):
    """The weights in a file are those of plain Keras, but for the order of sums."""
    expected = weights_of_one_process(ranks)
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-4, atol=1e-6)


def trained(done):
    """Of each rank: its numbers, digest of the weights, cores, digest of the secret."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "found " in line]
    return sorted(json.loads(line.partition("found ")[2]) for line in lines)


@pytest.mark.long
def test_srun_trains_as_one_process(cluster, tmp_path):
    """Two tasks, on two nodes."""
    path = tmp_path / "weights.npy"
    found = trained(cluster.run("srun", "-N2", "-n2", sys.executable, TRAIN, path))
    assert [each[:3] for each in found] == [[0, 0, 1], [1, 0, 1]]
    assert len({each[4] for each in found}) == 1
    assert_equals_one_process(path)


def test_tasks_that_srun_has_bound_keep_their_cores(cluster, tmp_path):
    """By task/affinity, on one node; each has half of them."""
    half, path = os.cpu_count() // 2, tmp_path / "weights.npy"
    words = ["srun", "-N1", "-n2", f"-c{half}", "--cpu-bind=cores", sys.executable]
    done = cluster.run(*words, TRAIN, path)
    found = trained(done)
    assert [each[:3] for each in found] == [[0, 0, 2], [1, 1, 2]]
    first, second = (set(each[5]) for each in found)
    assert len(first) == len(second) == half and not first & second
    assert f"CPU, {half} thread" in done.stdout, done.stdout
    assert_equals_one_process(path)


_ENVIRON = """
import json, os, pathlib, sys
path = pathlib.Path(sys.argv[1], os.environ["SLURM_PROCID"])
path.write_text(json.dumps(dict(os.environ)))
"""


def test_a_heterogeneous_step_trains_as_one_process(cluster, tmp_path):
    """With rank 0 on the second node, two ranks on the first, and a secret by munge.

    In an allocation that is not divided, nothing tells the others where rank 0 is.
    """

    def run(*words, within=()):
        first = ["-N1", "-n1", "-w", "n2", sys.executable, *words]
        second = ["-N1", "-n2", "-w", "n1", sys.executable, *words]
        words = [*within, "srun", *first, ":", *second]
        return cluster.run(*words, KERAS_DIST_SECRET="")

    run("-c", _ENVIRON, tmp_path, within=["salloc", "-N2", "-n4"])
    environs = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    places = [find_place(environ) for environ in environs[1:]]
    numbers = [(each.rank, each.local_rank, each.local_size) for each in places]
    assert numbers == [(1, 0, 2), (2, 1, 2)]
    with pytest.raises(ValueError, match="export KERAS_DIST_RDZV=n2:"):
        find_place(environs[0])
    path = tmp_path / "weights.npy"
    found = trained(run(TRAIN, path))
    assert [each[:3] for each in found] == [[0, 0, 1], [1, 0, 2], [2, 1, 2]]
    assert len({each[6] for each in found}) == 1
    assert_equals_one_process(path, 3)


def test_a_secret_of_munge_is_for_its_user_and_by_its_user(cluster):
    """It follows from nothing that another account knows, or could make."""
    credential = encode_secret("tea")
    assert decode_secret(credential) == decode_secret(credential) == "tea"
    words = ["runuser", "-u", "munge", "--"]
    assert (
        cluster.run(*words, "unmunge", "--string", credential).stdout.count("tea") == 0
    )
    forged = cluster.run(*words, "munge", "--string", "coffee").stdout
    with pytest.raises(ValueError, match="credential of MUNGE, cannot be used"):
        decode_secret(forged)


@pytest.mark.long
def test_tasks_that_are_ranks_save_at_sigusr1_and_go_on(cluster, tmp_path):
    """As under a launcher: exit code 75, and the weights of an undisturbed training."""
    words = ["srun", "-N2", "-n2", "-J", "saving", sys.executable, TRAIN]
    steps, path = tmp_path / "steps", tmp_path / "weights.npy"
    variables = {"RESUME": str(tmp_path / "resume")}
    process = cluster.start(*words, path, **variables, STEPS=str(steps), PAUSE="1")
    files = steps / "0.3", steps / "1.3"
    until(
        lambda: process.poll() is not None or all(file.exists() for file in files),
        f"{files}",
        120,
    )
    assert process.poll() is None, process.communicate()
    assert cluster.run("scancel", "-s", "USR1", "-n", "saving").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert not path.exists()
    assert cluster.run(*words, path, **variables).returncode == 0
    assert_equals_one_process(path)


def test_a_launcher_in_one_task_saves_at_sigusr1(cluster, tmp_path):
    """Exit code 75, as `scontrol requeue` in the job's script wants."""
    folder = tmp_path / "ranks"
    words = ["srun", "-N1", "-n1", "-J", "saving", *RUN, "-np", "2", STUB, folder]
    process = cluster.start(*words, "save")
    wait_for_files(folder / "there.0.0", folder / "there.0.1")
    assert cluster.run("scancel", "-s", "USR1", "-n", "saving").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "ended by SIGUSR1; the ranks ended together" in errors
    assert (folder / "saved.0").exists() and (folder / "saved.1").exists()
