"""`srun python`, where some nodes do not know the name of the first one."""

import sys

CODE = "import keras_dist; print('ranks', keras_dist.gather(keras_dist.rank()))"


def test_a_name_that_only_the_first_node_knows_is_looked_up_by_slurm(net, shared):
    """The other node asks `scontrol`; both have one secret all the same."""
    net.write_hosts("a", f"127.0.0.1 localhost\n127.0.1.1 a\n{net.address('b')} b\n")
    net.write_hosts("b", f"127.0.0.1 localhost\n{net.address('b')} b\n")
    folder = shared / "scontrol"
    folder.mkdir()
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   NodeAddr={net.address("a")} Port=1"\n')
    scontrol.chmod(0o755)
    step = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "a,b",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
    }
    tasks = []
    for number, name in enumerate("ab"):
        own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number)}
        tasks.append(net.start(name, [sys.executable, "-c", CODE], **step, **own))
    for task in tasks:
        stdout, stderr = task.communicate(timeout=120)
        assert task.returncode == 0, stderr
        assert "ranks [0, 1]" in stdout
