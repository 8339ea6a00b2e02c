"""Several tasks that do not know of each other are an error, and not two trainings."""

import os
import subprocess
import sys

import pytest
from launch import ROOT

from keras_dist.comm.world import check_not_stranded

# Variables of two tasks, as each program sets them for the second one. srun's are those
# of SLURM 22.05, also with --mpi=pmix.
_TASKS = {
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"},
    "MVAPICH2": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"},
    "PMIx": {"PMIX_RANK": "1"},
}

# One task; the script of an sbatch of two tasks; PyTorch's variables without torchrun.
_ALONE = [
    {},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"},
    {"RANK": "0", "WORLD_SIZE": "2"},
]


@pytest.mark.parametrize("program", _TASKS)
def test_tasks_that_do_not_know_how_they_meet_are_an_error(program):
    """It says which program started them, and what to do."""
    with pytest.raises(RuntimeError, match="nobody says how they meet") as error:
        check_not_stranded(_TASKS[program])
    assert program in str(error.value) and "keras-dist run" in str(error.value)


@pytest.mark.parametrize("environ", _ALONE)
def test_a_task_that_is_alone_trains(environ):
    """Also in the script of a job of several tasks."""
    check_not_stranded(environ)


def test_init_raises_it_before_anything_is_trained():
    """From the environment alone, on every task."""
    done = subprocess.run(
        [sys.executable, "-c", "import keras_dist; keras_dist.init()"],
        env={**os.environ, **_TASKS["srun"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: Several tasks were started" in done.stderr
    assert "srun (SLURM), SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2" in done.stderr
