"""`keras-dist run` without options, on hosts that a scheduler describes."""

import signal

import pytest
from network import LAUNCH
from test_hosts_faults import STUB, all_there, ended
from test_rdzv import SECRET


def described(net, way, number, shared):
    """The variables of a host, the first one or the second."""
    if way == "pbs":
        file = shared / "nodefile"
        file.write_text("a\nb\n")
        return {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file)}
    if way == "skypilot":
        addresses = "\n".join(net.address(name) for name in "ab")
        return {"SKYPILOT_NODE_RANK": str(number), "SKYPILOT_NODE_IPS": addresses}
    return {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(number),
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "29400",
    }


@pytest.mark.parametrize(
    "way",
    ["pbs", pytest.param("skypilot", marks=pytest.mark.long), "kubeflow"],
)
def test_two_hosts_of_a_scheduler_are_one_job(net, shared, way):
    """PBS starts the command on the first one alone; SIGTERM lets all of them save."""
    folder, words = shared / f"scheduler.{way}", [*LAUNCH, STUB]
    names = "a" if way == "pbs" else "ab"
    jobs = [
        net.start(
            name,
            [*words, folder, "save"],
            env={**described(net, way, number, shared), **SECRET},
        )
        for number, name in enumerate(names)
    ]
    all_there(folder)
    net.signal_command(jobs[0], signal.SIGTERM)
    for job in jobs:
        code, lines, _ = ended(job)
        assert code == 128 + signal.SIGTERM, lines
        assert "the ranks have saved" in lines[-1]
    assert (folder / "saved.0").exists() and (folder / "saved.1").exists()
