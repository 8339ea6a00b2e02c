"""Tasks of SLURM that are ranks, without a launcher of ours: how they meet."""

import json
import os
import subprocess
import sys

from keras_dist.launch.environments.slurm import task_of

LAUNCHER = "srun"

# The store of the job is a process of the first rank, which ends with it.
_processes: list[subprocess.Popen[str]] = []


def meet() -> None:
    """Set the variables by which Horovod finds the other tasks of this step.

    Raises:
        RuntimeError: If the tasks cannot meet.
    """
    task = task_of()
    assert task is not None
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_dist", "slurm-task"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(
            "The tasks of this step of SLURM could not meet; the cause was printed "
            f"above. Received: task {task.number} of {sum(task.counts)}, on "
            f"{task.nodes[task.node]}. Start the script by `srun keras-dist run`, or "
            "remove SLURM's variables from the environment of tasks that are to train "
            "side by side."
        )
    os.environ.update({**json.loads(line), **task.environment()})
    _processes.append(process)
