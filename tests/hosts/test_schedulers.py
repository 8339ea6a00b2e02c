"""`keras-dist run` without options, on hosts that a scheduler describes."""

import signal

from network import LAUNCH
from test_hosts_faults import STUB, all_there, ended
from test_rdzv import SECRET


def test_two_hosts_of_kubeflow_are_one_job(net, shared):
    """Its variables describe them; SIGTERM lets all of them save."""
    folder = shared / "scheduler"
    jobs = []
    for number, name in enumerate("ab"):
        described = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "a",
            "PET_MASTER_PORT": "29400",
        }
        words = [*LAUNCH, STUB, folder, "save"]
        jobs.append(net.start(name, words, env={**described, **SECRET}))
    all_there(folder)
    net.signal_command(jobs[0], signal.SIGTERM)
    for job in jobs:
        code, lines, _ = ended(job)
        assert code == 128 + signal.SIGTERM, lines
        assert "the ranks have saved" in lines[-1]
    assert (folder / "saved.0").exists() and (folder / "saved.1").exists()
