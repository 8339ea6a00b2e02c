"""`srun python`, where some nodes do not know the name of the first one."""

import sys

from harness.forked import slurm
from harness.on_hosts import outputs

CODE = "import keras_dist; print('ranks', keras_dist.gather(keras_dist.rank()))"


def test_a_name_that_only_the_first_node_knows_is_looked_up_by_slurm(net, folder):
    """The other node asks `scontrol`; both have one secret all the same."""
    net.write_hosts("a", f"127.0.0.1 localhost\n127.0.1.1 a\n{net.address('b')} b\n")
    net.write_hosts("b", f"127.0.0.1 localhost\n{net.address('b')} b\n")
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "   NodeAddr={net.address("a")} Port=1"\n')
    scontrol.chmod(0o755)
    step = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "a,b",
    }
    tasks = []
    for number, name in enumerate("ab"):
        own = slurm(number, 2, 4242) | step | {"SLURM_GTIDS": str(number)}
        tasks.append(net.start(name, [sys.executable, "-c", CODE], **own))
    assert outputs(tasks)[0].count("ranks [0, 1]") == 2
