"""torchrun and Ray Train themselves start ranks, and start them again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.launching import PYTHONPATH, free_port, launch, start
from harness.needs import needs

pytestmark = needs("clusters", "ray", "torch")

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TRAINING = HERE / "training.py"
ENV = {
    "PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{HERE}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}


def by_torchrun(folder, case, *, restarts=0, **variables):
    """A training on two processes of torchrun."""
    options = ["--max-restarts", restarts, "--master-port", free_port()]
    return launch([*TORCHRUN, *options, TRAINING, folder, case], env=ENV | variables)


def by_ray(folder, case, *, restarts=0, **variables):
    """A training on two workers of Ray Train."""
    return launch([HERE / "ray_train.py", folder, restarts, case], env=ENV | variables)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of plain Keras on one process."""
    folder = tmp_path_factory.mktemp("one")
    launch([TRAINING, folder, "plain"], env=ENV, check=True)
    return np.load(folder / "weights.npy")


LAUNCHERS = [by_torchrun, by_ray]


@pytest.mark.parametrize("by", LAUNCHERS)
def test_a_failure_that_is_restarted_ends_as_one_process(by, tmp_path, expected):
    """The launcher starts all ranks again, and `resume=` goes on."""
    done = by(tmp_path, "once", restarts=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained on 2 ranks" in done.stdout + done.stderr
    assert "goes on from a checkpoint" in done.stdout + done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "weights.npy"), expected, rtol=1e-5)


@pytest.mark.parametrize("by", LAUNCHERS)
def test_a_rank_that_fails_is_read_in_full(by, tmp_path):
    """Its traceback, and a line on the other rank."""
    done = by(tmp_path, "fail")
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    assert "raise KeyError" in printed and "KeyError: 'tea'" in printed, printed
    assert not (tmp_path / "weights.npy").exists()


@pytest.mark.parametrize("by", LAUNCHERS)
def test_a_rank_that_sleeps_for_ever_is_named(by, tmp_path):
    """With the stacks of all ranks, by all of them."""
    done = by(tmp_path, "sleep", KERAS_DIST_STALL_SECONDS="5")
    assert done.returncode != 0
    printed = done.stdout + done.stderr
    assert "no rank has made progress for 5 s" in printed, printed
    assert re.search(r"Rank 1 is missing: at the beginning of epoch 3", printed)
    assert printed.count("Stack of the main thread") == 2, printed
    if by is by_torchrun:
        assert "exitcode  : 70" in printed, printed


def test_sigterm_to_torchrun_saves(tmp_path, expected):
    """Both ranks, in the middle of an epoch; the same command continues from there."""
    words = [*TORCHRUN, "--master-port", free_port(), TRAINING, tmp_path, "long"]
    process = start(words, env=ENV, stderr=subprocess.STDOUT)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "epoch 3 begins" in line:
            break
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0, lines
    assert not (tmp_path / "weights.npy").exists()
    done = by_torchrun(tmp_path, "")
    assert done.returncode == 0, done.stderr
    assert "goes on from a checkpoint" in done.stdout, printed
    np.testing.assert_allclose(np.load(tmp_path / "weights.npy"), expected, rtol=1e-5)
