"""Each launcher's variables give the place of a rank, or an error that names them."""

import json
import os
import subprocess
import sys

import pytest
from harness.launching import ROOT
from harness.pages import blocks

from keras_dist.clusters import Place, find_place

WORKERS = ["10.0.0.1:4001", "10.0.0.1:4002", "10.0.0.2:4001"]


def tf_config(kind="worker", index=0, **cluster):
    """TF_CONFIG of a task, as Ray Train and Vertex AI set it."""
    cluster = cluster or {"worker": WORKERS}
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def variables(text):
    """Variables from a line of the shell."""
    return dict(word.split("=") for word in text.split())


HOROVOD = variables(
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
    " OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
SLURM = variables(
    "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0 SLURM_GTIDS=2,3"
    " SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURMD_NODENAME=n2"
    " SLURM_JOB_ID=7 SLURM_STEP_ID=0"
)
# `srun -w n2 -n1 python … : -w n1 -n2 python …`, as SLURM 22.05 describes rank 0: in
# an allocation for one job, in one for a heterogeneous job, and if it makes its own.
STEP = variables(
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 SLURM_GTIDS=0"
    " SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_NODES=2 SLURMD_NODENAME=n2"
    " SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_JOB_ID=2 SLURM_STEP_ID=0"
    " SLURM_JOB_NODELIST=n[1-2]"
)
HET_JOB = STEP | variables(
    "SLURM_HET_SIZE=2 SLURM_JOB_NODELIST_HET_GROUP_0=n2"
    " SLURM_JOB_NODELIST_HET_GROUP_1=n1"
)
PACK_JOB = {name.replace("_HET_G", "_PACK_G"): HET_JOB[name] for name in HET_JOB}
TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
    " MASTER_ADDR=a MASTER_PORT=29400"
)
PALS = variables(
    "PMI_RANK=3 PMI_SIZE=4 PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2"
)
FLUX = variables(
    "FLUX_TASK_RANK=2 FLUX_JOB_SIZE=3 FLUX_TASK_LOCAL_ID=0 FLUX_JOB_NNODES=2"
    " FLUX_JOB_ID=f1 KERAS_DIST_RDZV=n1:29400 PMI_RANK=2 PMI_SIZE=3"
)
PODS = variables(
    "JOB_COMPLETION_INDEX=1 KERAS_DIST_NNODES=2 KERAS_DIST_RDZV=train-0.train:29400"
)

PLACES = [
    (HOROVOD, Place("horovodrun", 3, 4, 1, 2)),
    (OPEN_MPI, Place("mpirun (Open MPI)", 1, 2, 1, 2)),
    (MPICH, Place("mpirun (MPICH)", 1, 2, 1, 2)),
    *(  # in a batch script of SLURM, and by its daemons on two nodes
        (MPICH | {"PMI_RANK": "0"} | more, Place("mpirun (MPICH)", 0, 2, 1, 2))
        for more in (
            {"SLURM_PROCID": "0"},
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        )
    ),
    (
        {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0"},
        Place("mpirun (MPICH)", 0, 2),
    ),
    *(
        (SLURM | more, Place("srun", 2, 4, 0, 2, "n1", 20707))
        for more in ({}, {"PMI_RANK": "2", "PMI_SIZE": "4"})
    ),
    *(
        (environ | more, Place("srun", rank, 3, local, count, "n2", 20202))
        for environ in (HET_JOB, PACK_JOB, STEP | {"KERAS_DIST_RDZV": "n2:20202"})
        for more, rank, local, count in (
            ({}, 0, 0, 1),
            (
                variables(
                    "SLURM_PROCID=2 SLURM_GTIDS=1,2 SLURM_LOCALID=1 SLURM_NODEID=1"
                    " SLURMD_NODENAME=n1"
                ),
                *(2, 1, 2),
            ),
        )
    ),
    (  # a step of the second component alone
        HET_JOB
        | variables(
            "SLURM_JOB_NODELIST=n1 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=2"
            " SLURM_GTIDS=0,1 SLURMD_NODENAME=n1"
        ),
        Place("srun", 0, 2, 0, 2, "n1", 20202),
    ),
    (PALS, Place("mpiexec (Cray PALS)", 3, 4, 1, 2)),
    *(
        (environ | {"KERAS_DIST_RDZV": "a:7"}, Place(name, *numbers, 1, 2, "a", 7))
        for environ, name, *numbers in (
            (OPEN_MPI, "mpirun (Open MPI)", 1, 2),
            (TORCHRUN, "torchrun", 3, 4),
            (PALS, "mpiexec (Cray PALS)", 3, 4),
        )
    ),
    (FLUX, Place("flux run", 2, 3, 0, 1, "n1", 29400)),
    (
        FLUX | {"FLUX_JOB_NNODES": "1", "KERAS_DIST_RDZV": ""},
        Place("flux run", 2, 3, 0, 3, "127.0.0.1", 25_380),
    ),
    (
        FLUX | {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "2"},
        Place("flux run", 2, 3, 2, 3, "n1", 29400),
    ),
    (TORCHRUN, Place("torchrun", 3, 4, 1, 2, "a", 29401)),
    (tf_config(index=1), Place("TF_CONFIG", 1, 3, 1, 2, "10.0.0.1", 4001)),
    (tf_config(index=2), Place("TF_CONFIG", 2, 3, 0, 1, "10.0.0.2", 4001)),
    (
        tf_config("worker", 0, chief=["c:1"], worker=["w:1"]),
        Place("TF_CONFIG", 1, 2, 0, 1, "c", 1),
    ),
    (PODS, Place("Kubernetes", 1, 2, 0, 1, "train-0.train", 29400)),
]


@pytest.mark.parametrize(
    ("environ", "place"), PLACES, ids=[place.launcher for _, place in PLACES]
)
def test_the_variables_of_a_launcher_are_a_place(environ, place):
    """All of it: rank, size, local ones, and where the ranks meet."""
    found = find_place(environ)
    if place.address == "10.0.0.2":  # rank 0 serves, wherever this rank is
        assert found.address == "10.0.0.1"
    else:
        assert found == place


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the script of a job
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"TF_CONFIG": ""},
        tf_config(worker=WORKERS[:1]),
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_one_process_is_no_rank(environ):
    """Whatever the machine sets for other programs, or for a single task."""
    assert find_place(environ) is None


def without(environ, name):
    """The variables without one."""
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(HOROVOD, "HOROVOD_SIZE"), "HOROVOD_SIZE=nothing"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE=nothing"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST=nothing"),
        (without(SLURM, "SLURM_GTIDS"), "SLURM_GTIDS=nothing"),
        (without(SLURM, "SLURM_JOB_ID"), "SLURM_JOB_ID=nothing"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR=nothing"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT=nothing"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE=nothing"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (tf_config("ps", 0), "no parameter servers"),
        (tf_config("evaluator", 0), "no evaluator"),
        (tf_config("worker", 7), "is not one of the workers"),
        ({"TF_CONFIG": "{"}, "does not describe a cluster. Received: '{'"),
        (tf_config(worker=["a", "b"]), "does not describe a cluster"),
        (without(PODS, "KERAS_DIST_RDZV"), "KERAS_DIST_RDZV=nothing"),
        (SLURM | {"SLURM_LOCALID": "3"}, "rank 3 of 2 on its host.*SLURM_GTIDS"),
        (STEP, "=n2 on rank 0.*export KERAS_DIST_RDZV=n2:20202"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "Received: LOCAL_RANK=x"),
        (tf_config(["worker"], 0), "is not one of the workers"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "port 65536.*MASTER_PORT"),
        (tf_config(worker=["a:70000", "b:1"]), "port 70000.*TF_CONFIG"),
        (without(FLUX, "KERAS_DIST_RDZV"), "KERAS_DIST_RDZV=nothing"),
        (PODS | {"KERAS_DIST_RDZV": "a:70000"}, "port 70000.*KERAS_DIST_RDZV"),
    ],
)
def test_half_a_description_is_an_error(environ, words):
    """It names the variable and its value; the alternative is a training alone."""
    with pytest.raises(ValueError, match=words):
        find_place(environ)


def test_two_launchers_are_an_error():
    """`srun` inside of `mpirun`: which rank would this process be?"""
    for pair in (OPEN_MPI | SLURM, OPEN_MPI | TORCHRUN, TORCHRUN | tf_config(index=1)):
        with pytest.raises(ValueError, match="Two launchers say which rank"):
            find_place(pair)


@pytest.mark.parametrize(
    ("environ", "choice", "launcher"),
    [
        (OPEN_MPI | SLURM, "slurm", "srun"),
        (OPEN_MPI | SLURM, "mpi", "mpirun (Open MPI)"),
        (TORCHRUN | tf_config(index=1), "torchrun", "torchrun"),
        (HOROVOD | SLURM, "slurm", "horovodrun"),  # by which a rank has met the others
        (HOROVOD, "none", None),
        (SLURM, "pals", None),
    ],
)
def test_a_launcher_can_be_chosen(environ, choice, launcher):
    """Where two are there, or none is meant; one that is not there is no rank."""
    place = find_place(environ | {"KERAS_DIST_CLUSTER": choice})
    assert (place and place.launcher) == launcher


def test_a_launcher_that_does_not_exist_is_an_error():
    """It lists the others."""
    with pytest.raises(ValueError, match="KERAS_DIST_CLUSTER=lsf. Use one of .*slurm"):
        find_place({"KERAS_DIST_CLUSTER": "lsf"})


def test_a_package_may_bring_a_launcher(tmp_path):
    """By an entry point, whether it is chosen or found: the class of the page."""
    *_, (_, code) = blocks(ROOT / "docs" / "how_to" / "launch.md", "py")
    (tmp_path / "lsf_for_keras.py").write_text(code)
    info = tmp_path / "lsf_for_keras-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lsf_for_keras\n")
    entry = "[keras_dist.clusters]\nlsf = lsf_for_keras:Lsf\n"
    (info / "entry_points.txt").write_text(entry)
    numbers = "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1"
    code = "from keras_dist.clusters import find_place; print(find_place())"
    for choice in ("", "lsf"):
        more = {"LSB_HOSTS": "a a", "KERAS_DIST_CLUSTER": choice}
        env = os.environ | variables(numbers) | more
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        place = Place("jsrun", 1, 2, 1, 2, "a", 29_400)
        assert done.stdout.strip() == str(place), done.stderr


def test_a_launcher_that_srun_has_started_counts():
    """One task on each node starts torchrun, or Open MPI's daemons."""
    daemons = SLURM | variables("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2")
    assert find_place(daemons | OPEN_MPI).launcher == "mpirun (Open MPI)"
    assert find_place(daemons | TORCHRUN).launcher == "torchrun"
    assert find_place(SLURM | HOROVOD).launcher == "horovodrun"
