"""MPICH itself starts ranks, which ask mpi4py, or meet where a variable says."""

import sys
from pathlib import Path

import numpy as np
import pytest
from launch import PYTHONPATH, free_port, launch
from needs import needs

pytestmark = needs("clusters", "mpi4py")

HERE = Path(__file__).parent
MPIEXEC = [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable]


@pytest.mark.parametrize("transport", ["horovod", "tensorflow"])
@pytest.mark.parametrize("cluster", ["mpi4py", "mpi"])
def test_ranks_of_mpiexec_train_as_one_process(tmp_path, cluster, transport):
    """Over both transports, of which neither was built for MPI."""
    training, env = HERE / "training.py", {"PYTHONPATH": PYTHONPATH}
    launch([training, tmp_path, "plain"], env=env, check=True)
    expected = np.load(tmp_path / "weights.npy")
    env |= {"KERAS_DIST_CLUSTER": cluster, "KERAS_DIST_TRANSPORT": transport}
    if cluster == "mpi":
        env["KERAS_DIST_RDZV"] = f"127.0.0.1:{free_port()}"
    done = launch([*MPIEXEC, training, tmp_path, ""], env=env, check=True)
    assert "trained on 2 ranks" in done.stdout + done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "weights.npy"), expected, 1e-5, 1e-6)
