"""Ranks under a real SLURM; left out, with the reason, where it is not installed."""

import json
import sys

import numpy as np
import pytest
from harness import slurm
from harness.launching import RUN, until, wait_for_files, write_script

from keras_dist.comm.rendezvous import decode_secret, encode_secret

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

TRAIN, STUB = "tests/hosts/train.py", "tests/hosts/stub.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of SLURM on this machine."""
    with slurm.nodes(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def assert_equals_one_process(cluster, path):
    """The weights in a file are those of plain Keras, but for the order of sums."""
    alone = path.with_name("alone.npy")
    assert cluster.run(sys.executable, TRAIN, alone, 2).returncode == 0
    np.testing.assert_allclose(np.load(path), np.load(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "variables"),
    [(["-N2"], {"KERAS_DIST_SECRET": ""}), (["-N1", "--overcommit"], {})],
    ids=["nodes", "node"],
)
def test_srun_trains_as_one_process(cluster, tmp_path, options, variables):
    """Two tasks, on two nodes without a secret, or on one node."""
    path, count = tmp_path / "weights.npy", 3 - int(options[0][-1])  # on each node
    words = ["srun", "-n2", *options, sys.executable, TRAIN, path]
    done = cluster.run(*words, **variables)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if "found " in line]
    found = sorted(json.loads(line.partition("found ")[2]) for line in found)
    assert [each[:3] for each in found] == [[k, k % count, count] for k in range(2)]
    assert len({each[4] for each in found}) == 1
    assert_equals_one_process(cluster, path)


_SECRETS = """
import os
import keras_dist
keras_dist.init()
print("found", len(set(keras_dist.gather(os.environ["KERAS_DIST_SECRET"]))))
"""


def test_tasks_without_a_secret_have_one_by_munge(cluster, tmp_path):
    """Which follows from nothing that another account knows, or could make."""
    command = ["srun", "-n3", "-N2", "--overcommit", sys.executable]
    script = write_script(tmp_path, _SECRETS)
    done = cluster.run(*command, script, KERAS_DIST_SECRET="")
    assert done.stdout.count("found 1\n") == 3, done.stdout + done.stderr
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
    assert_equals_one_process(cluster, path)


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
