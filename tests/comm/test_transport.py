"""`keras-dist run --transport`: what is taken, and MPI without its launcher."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import PYTHONPATH

from keras_dist.launch import horovod_library, mpi, processes, systems


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that says what Horovod and the machine have."""

    def set_to(built, gpus=0, mpirun="mpirun (Open MPI) 4.1.4"):
        folder = tmp_path / f"bin{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if mpirun is not None:
            program(folder / "mpirun", f"echo '{mpirun}'; echo; echo Report bugs")
        monkeypatch.setattr(horovod_library, "built", lambda: built)
        monkeypatch.setattr(horovod_library, "num_gpus", lambda: gpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5})
        monkeypatch.setenv("PATH", str(folder))

    for name in horovod_library._OF_HOROVOD:
        monkeypatch.delenv(name, raising=False)
    return set_to


def program(path, script):
    """Write a program that a shell runs."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def transport_of(requested, is_one_host=True, num_ranks=2):
    """As of the launcher, by default for two ranks of this machine."""
    return horovod_library.transport_of(
        requested, is_one_host=is_one_host, num_ranks=num_ranks
    )


def test_by_itself_mpi_is_taken_between_the_ranks_of_one_machine(machine, monkeypatch):
    """And only where all is there; else Gloo, without a word."""
    machine(["gloo", "mpi"])
    assert transport_of("auto") == transport_of("mpi") == "mpi"
    assert transport_of("auto", is_one_host=False) == "gloo"
    assert transport_of("auto", num_ranks=1) == "gloo"
    assert transport_of("auto", num_ranks=3) == "mpi"
    assert transport_of("auto", num_ranks=4) == "gloo"  # on three cores
    assert transport_of("mpi", num_ranks=4) == "mpi"
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    assert transport_of("auto") == "gloo"
    monkeypatch.delenv("HOROVOD_CPU_OPERATIONS")
    machine(["gloo", "mpi", "nccl"], gpus=1)
    assert transport_of("auto") == "gloo"
    machine(["gloo"])
    assert transport_of("auto") == "gloo"


OTHERS = [None, "mpirun (Open MPI) 5.0.3", "HYDRA build details:", ""]


@pytest.mark.parametrize("mpirun", OTHERS)
def test_another_mpirun_is_not_taken_by_itself_and_an_error_if_requested(
    machine, mpirun
):
    """Its variables and options are others."""
    machine(["gloo", "mpi"], mpirun=mpirun)
    assert transport_of("auto") == "gloo"
    words = "apt-get install openmpi-bin" if mpirun is None else "is not Open MPI 4"
    with pytest.raises(ValueError, match=words):
        transport_of("mpi")


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (["gloo"], r"Open MPI \(dnf install openmpi-devel openmpi\): keras-dist"),
        (["gloo", "mpi"], r"missing: dnf install openmpi \(.* after `module load mpi`"),
    ],
)
def test_missing_packages_are_those_of_the_system(machine, monkeypatch, built, words):
    """Here Fedora's, of which the second has `mpirun` outside of the PATH."""
    fedora = systems.system_of({}, "ID=fedora")
    for module in (systems, horovod_library):
        monkeypatch.setattr(module, "this_system", lambda: fedora)
    machine(built, mpirun=None)
    with pytest.raises(ValueError, match=words):
        transport_of("mpi")


REFUSED = [
    ("mpi", ["gloo"], True, "install-horovod --mpi. Received: Horovod with gloo."),
    ("mpi", ["gloo", "mpi"], False, "On several hosts start them by `mpirun`"),
    ("nccl", ["gloo", "mpi"], True, "install-horovod --nccl. Received: .* gloo, mpi"),
    ("nccl", ["gloo", "nccl"], False, "no GPU here"),
]


@pytest.mark.parametrize(("requested", "built", "is_one_host", "words"), REFUSED)
def test_what_is_not_built_is_an_error_that_says_how_to_build_it(
    machine, requested, built, is_one_host, words
):
    """Before any rank is started."""
    machine(built)
    with pytest.raises(ValueError, match=words):
        transport_of(requested, is_one_host)


def test_what_is_there_is_used_as_requested(machine):
    """Gloo always; NCCL where there are GPUs."""
    machine(["gloo", "mpi", "nccl"], gpus=2)
    found = [transport_of(name) for name in ("gloo", "mpi", "nccl")]
    assert found == ["gloo", "mpi", "gloo"]


# A rank of MPI without Horovod: it prints the sum over all ranks of 1.
RANK = """
import ctypes, os, signal, sys
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
mpi.MPI_Init(None, None)
world, number, add = (
    ctypes.byref(ctypes.c_char.in_dll(mpi, name))
    for name in ("ompi_mpi_comm_world", "ompi_mpi_float", "ompi_mpi_op_sum")
)
def total():
    own, summed = (ctypes.c_float * 1000)(*[1] * 1000), (ctypes.c_float * 1000)()
    mpi.MPI_Allreduce(own, summed, 1000, number, add, world)
    return int(summed[999])
print("sum", total(), os.environ["HOROVOD_CONTROLLER"], flush=True)
if sys.argv[1:] and os.environ["HOROVOD_RANK"] == "1":
    if sys.argv[1] == "hang":
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1:]:
    total()
mpi.MPI_Finalize()
"""
JOB = """
import sys
from keras_dist.launch.local import run_locally
from keras_dist.launch.ranks import Command
command = Command("program", sys.argv[2:], {}, transport="mpi")
restarts = 1 if "again" in sys.argv else 0
sys.exit(run_locally(command, int(sys.argv[1]), restarts=restarts))
"""


@pytest.fixture
def job(tmp_path):
    """A function that starts ranks over MPI; all that they leave is an error."""
    if shutil.which("mpirun") is None:
        pytest.skip("left out: no mpirun: apt-get install openmpi-bin")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    started = []

    def start(ranks, *words):
        command = [sys.executable, "-c", JOB, str(ranks), sys.executable, str(script)]
        started.append(
            subprocess.Popen(
                [*command, *words],
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "TMPDIR": str(tmp_path),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    assert servers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir() if path != script] == []
    assert eventually(lambda: not left_in_memory())


def left_in_memory():
    """Folders of jobs that have ended, among those of jobs of others."""
    names = [path.name for path in processes.SHARED_MEMORY.glob("keras_dist.*")]
    return [name for name in names if not processes.members(name.split(".")[1])]


def servers(folder):
    """Processes that `mpirun` is, or has started, for jobs of a test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
        if f"{folder}/" in words and "rank.py" not in words:
            found.append(words)
    return found


def eventually(is_true):
    """Wait until it is, at most a minute."""
    begin = time.monotonic()
    while not is_true() and time.monotonic() - begin < 60:
        time.sleep(0.1)
    return is_true()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_find_each_other_by_mpi_as_children_of_the_launcher(job, ranks):
    """`mpirun` starts none of them; it is gone with the job."""
    process = job(ranks)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert stdout.count(f"sum {ranks} mpi") == ranks


def test_over_mpi_too_the_rank_that_failed_first_is_named_and_all_are_ended(job):
    """The others wait in a collective; MPI itself would say nothing, or end them."""
    process = job(2, "die", "again")
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL
    assert stderr.count("rank 1 failed first") == 2, stderr  # and once more, restarted
    assert "MPI" not in stderr.replace("over MPI", "")


ENDS = [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]


@pytest.mark.parametrize("number", ENDS)
def test_over_mpi_too_nothing_is_left_when_the_launcher_is_ended(job, number, tmp_path):
    """Neither a rank, nor the server, nor its shared memory."""
    process = job(2, "hang")
    assert eventually(lambda: servers(tmp_path))
    for _ in range(2):
        assert "sum 2" in process.stdout.readline()
    process.send_signal(number)
    process.wait(timeout=40)
    assert eventually(lambda: not servers(tmp_path))
    assert eventually(lambda: not list(tmp_path.glob("keras_dist.*")))


def test_a_server_that_does_not_start_is_an_error_with_its_message(
    monkeypatch, tmp_path
):
    """As where `mpirun` is another MPI's."""
    program(tmp_path / "mpirun", "echo no such option >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="no such option"), mpi.server("0", 2):
        pytest.fail("started")


def test_gloo_is_used_where_the_server_does_not_start_and_mpi_was_not_requested(
    monkeypatch, tmp_path, capfd
):
    """One line says so, whatever `mpirun` has printed."""
    program(tmp_path / "mpirun", "echo no such; echo option >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with mpi.variables("mpi", "0", 2, may_use_gloo=True) as own:
        assert own == {}
    (line,) = capfd.readouterr().err.splitlines()
    assert "`mpirun` did not start" in line and "Gloo is used instead" in line
    assert "no such option" in line
    assert not list(processes.SHARED_MEMORY.glob("keras_dist.0.*"))
