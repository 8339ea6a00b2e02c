"""Tasks that do not know of each other are an error; the user's settings come first."""

import os

import pytest
from harness.forked import alone

from keras_dist.clusters import Place
from keras_dist.comm import horovod_transport, runtime
from keras_dist.comm.devices import Device
from keras_dist.comm.world import check_not_elastic, check_not_stranded

# Variables of two tasks, as each program sets them for the second one.
_TASKS = {
    "MVAPICH2": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"},
    "PMIx": {"PMIX_RANK": "1"},
}

# One task; the script of an sbatch of two tasks.
_ALONE = [
    {"HOROVOD_ELASTIC": "0"},
    {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"},
]


@pytest.mark.parametrize("program", _TASKS)
def test_tasks_that_do_not_know_how_they_meet_are_an_error(monkeypatch, program):
    """It says which program started them, and what to do."""
    monkeypatch.setattr(os, "environ", _TASKS[program])
    with pytest.raises(RuntimeError, match="no variable says how they meet") as error:
        check_not_stranded()
    assert program in str(error.value) and "keras-dist run" in str(error.value)


@pytest.mark.parametrize("environ", _ALONE)
def test_a_task_that_is_alone_trains(monkeypatch, environ):
    """Also in the script of a job of several tasks, and where a mode is off."""
    monkeypatch.setattr(os, "environ", environ)
    check_not_stranded()
    check_not_elastic()


_INIT = """
import os
import keras_dist
for environ in {environs}:
    os.environ |= environ
    try:
        keras_dist.init()
    except RuntimeError as error:
        print(error)
    for name in environ:
        del os.environ[name]
"""

_ELASTIC = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"}

# Horovod has no MPI here; each would train alone.
_MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def test_init_raises_before_anything_is_trained(run_ranks):
    """Tasks that do not meet, Horovod's elastic mode, `mpirun` without MPI."""
    environs = [_TASKS["jsrun"], _ELASTIC, _MPIRUN]
    [(_, out)] = run_ranks(alone, [0], 1, _INIT.format(environs=environs))
    stranded, elastic, mpirun = out.splitlines()
    assert stranded.startswith("Several tasks were started")
    assert "jsrun, JSM_NAMESPACE_RANK=1, JSM_NAMESPACE_SIZE=2" in stranded
    assert "does not train in Horovod's elastic mode" in elastic
    assert "HOROVOD_ELASTIC=1" in elastic and "--restarts" in elastic
    assert "started 2 processes, but Horovod connects 1" in mpirun
    assert "keras-dist install-horovod --mpi" in mpirun


def test_ranks_that_have_not_met_do_not_try_again(monkeypatch):
    """A later call, as in the user's `finally`, has the same error at once."""
    tried = []

    def fail(place):
        tried.append(place)
        raise RuntimeError("Rank 1 is missing.")

    place = Place("torchrun", 0, 2, address="localhost")
    monkeypatch.setattr(runtime, "_runtime", runtime._Runtime(device=Device()))
    monkeypatch.setattr(runtime, "find_place", lambda: place)
    monkeypatch.setattr(runtime, "meet", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Rank 1 is missing"):
            runtime.rank()
    assert tried == [place]


_BRIDGES = ["lo", "eth0", "docker0"]


@pytest.mark.parametrize(
    ("environ", "is_on_cpu", "expected"),
    [
        ({}, True, ("1", "none", "127.0.0.1/8,sppp,docker0", None)),
        ({}, False, (None, None, "127.0.0.1/8,sppp,docker0", None)),
        (
            {"yield": "0", "copy": "cma", "exclude": "lo"},
            True,
            ("0", "cma", "lo", None),
        ),
        ({"include": "eth0"}, True, ("1", "none", None, "eth0")),
    ],
)
def test_open_mpi_on_cpus_does_not_spin_and_does_not_connect_by_bridges(
    monkeypatch, environ, is_on_cpu, expected
):
    """What the user has set stays."""
    names = {
        "yield": "OMPI_MCA_mpi_yield_when_idle",
        "copy": "OMPI_MCA_btl_vader_single_copy_mechanism",
        "exclude": "OMPI_MCA_btl_tcp_if_exclude",
        "include": "OMPI_MCA_btl_tcp_if_include",
    }
    own = {names[key]: value for key, value in environ.items()}
    monkeypatch.setattr(os, "environ", own)
    cards = list(enumerate(_BRIDGES))
    monkeypatch.setattr(horovod_transport.socket, "if_nameindex", lambda: cards)
    monkeypatch.setattr(horovod_transport, "_XPMEM", "/none")
    horovod_transport.set_for_mpi(is_on_cpu=is_on_cpu)
    assert tuple(own.get(name) for name in names.values()) == expected


_WAITS = """
import time
from keras_dist.comm.horovod_transport import limit_start
with limit_start(0, 2):
    pass
time.sleep(0.5)
print("in time", flush=True)
with limit_start(0, 2):
    time.sleep(60)
"""


def test_a_start_of_mpi_that_takes_too_long_ends_the_rank(run_ranks):
    """With the exit code of a stall, and what to do."""
    env = {"KERAS_DIST_STALL_SECONDS": "0.2"}
    [(code, out)] = run_ranks(alone, [0], 1, _WAITS, env=env)
    assert code == 70, out
    assert "in time" in out
    assert "MPI has not connected the ranks for 0.2 s" in out
    assert "btl_tcp_if_include" in out


def test_the_cycles_of_horovod_are_the_users_first(monkeypatch):
    """Who has set Horovod's own has these; else the longest is 10 ms."""
    found = []
    for environ in ({}, {"HOROVOD_CYCLE_TIME": "1"}):
        monkeypatch.setattr(os, "environ", environ)
        horovod_transport.set_for_cpu()
        names = ("KERAS_DIST_LONGEST_CYCLE_MS", "HOROVOD_CYCLE_TIME")
        found.append([environ.get(name) for name in names])
    assert found == [["10", "2.5"], [None, "1"]]
