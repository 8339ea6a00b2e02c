"""MPICH itself starts ranks, which ask mpi4py, or meet where a variable says."""

import sys
from pathlib import Path

import numpy as np
import pytest
from harness.launching import PYTHONPATH, free_port, launch
from harness.needs import needs

pytestmark = needs("clusters", "mpi4py")

HERE = Path(__file__).parent
MPIEXEC = [Path(sys.executable).parent / "mpiexec", "-n", "2", sys.executable]

# Each rank starts a process before the ranks connect, which imports the package, too.
CHILD = """
import subprocess, sys
import keras_dist
from keras_dist.comm import is_rank_child
if "child" in sys.argv:
    print("is a child:", is_rank_child())
else:
    subprocess.run([sys.executable, __file__, "child"], check=True, timeout=60)
"""


def test_processes_that_ranks_start_do_not_ask_mpi(tmp_path):
    """They would wait for the ranks, or end the job."""
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    env = {"PYTHONPATH": PYTHONPATH, "KERAS_DIST_CLUSTER": "mpi4py"}
    env["KERAS_DIST_TRANSPORT"] = "horovod"
    done = launch([*MPIEXEC, script], env=env, check=True)
    assert done.stdout.count("is a child: True") == 2


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
