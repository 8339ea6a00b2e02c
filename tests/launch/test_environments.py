"""What schedulers say in their variables, and `keras-dist run` without options."""

import socket

import pytest
from test_launch import start as run
from test_meeting import command, ended, free_port

from keras_dist.launch import environments

_SLURM = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
_TRAINER = {  # as Kubeflow's Trainer sets them
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
_INDEXED = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (_SLURM, (4, 3, "n1", 20707, 1)),
        (_TRAINER, (3, 2, "job-node-0-0.job", 29500, 2)),
        (_INDEXED, (2, 1, "digits-0.digits.here", 29400, None)),
        ({**_TRAINER, **_SLURM}, (4, 3, "n1", 20707, 1)),
    ],
)
def test_where_hosts_meet_is_in_the_variables(monkeypatch, variables, expected):
    """How many they are, which one this is, and where the first one listens."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "digits-1.digits.here")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    found = environments.detect(variables)
    assert (
        found.num_hosts,
        found.number,
        found.address,
        found.port,
        found.num_ranks,
    ) == expected
    assert found.is_quiet == ("SLURM_JOB_ID" in variables)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"JOB_COMPLETION_INDEX": "1"},  # who knows how many there are
        {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"},
        {**_TRAINER, "LOCAL_RANK": "0"},  # a process of torchrun itself
        {"SLURM_JOB_ID": "7"},
    ],
)
def test_variables_that_do_not_say_enough_are_no_environment(variables):
    """The command then starts ranks on its own host, as ever."""
    assert environments.detect(variables) is None


def test_a_pod_without_a_service_is_named(monkeypatch):
    """With what to set; its name alone is known to nobody else."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "digits-1")
    with pytest.raises(ValueError, match="in the pod digits-1. Set `subdomain`"):
        environments.detect(_INDEXED)


_SCRIPT = """
import os
print(*(os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_SIZE")))
"""


def test_hosts_of_an_environment_run_as_one_job(tmp_path, monkeypatch):
    """Two commands on this machine, told apart by their variables alone."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    processes = []
    for number in (0, 1):
        monkeypatch.setenv("NODE_RANK", str(number))
        processes.append(command(script))
    found = ended(processes)
    assert [code for code, _, _ in found] == [0, 0], found
    assert [printed for _, printed, _ in found] == ["0 2 2\n", "[1] 1 2 2\n"]


def test_a_secret_is_needed_where_the_environment_has_none():
    """As without ssh: before anything listens."""
    done = run("-m", "this", **_TRAINER)
    assert done.returncode == 1
    assert "needs a secret of at least 16 characters. Received: none." in done.stderr
