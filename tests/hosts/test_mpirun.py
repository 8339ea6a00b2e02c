"""Training by `mpirun`, where it and a Horovod with MPI are installed."""

import shutil
import sys
from importlib import metadata

import pytest
from harness.on_hosts import TRAIN, assert_trained, count_ranks


def missing():
    """What `mpirun` lacks here; empty if nothing."""
    if shutil.which("mpirun") is None:
        return "mpirun: apt-get install openmpi-bin"
    if ".mpi" not in metadata.version("horovod"):
        return "MPI in Horovod: keras-dist install-horovod --mpi"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"left out: no {missing()}")


def start(net, *words, hosts="a:1,b:1", **env):
    """A command of one rank on each of two hosts, or of others."""
    mpirun = ["mpirun", "--allow-run-as-root", "-H", hosts]
    mpirun += ["-np", count_ranks(hosts)]
    for name in ("PATH", "PYTHONPATH", "KERAS_DIST_STALL_SECONDS"):
        mpirun += ["-x", name]
    env = {"KERAS_DIST_STALL_SECONDS": "120", **env}
    return net.run("a", [*mpirun, *words], **env)


@pytest.fixture
def docker(net):
    """Both hosts have a bridge for containers, and it has one address."""
    for name in "ab":
        net.add_bridge(name, "docker0", "172.17.0.1/16")


_MORE = "a:2,b:2", "a:1,b:1,c:1"


@pytest.mark.parametrize(
    "hosts",
    ["a:1,b:1", *(pytest.param(more, marks=pytest.mark.long) for more in _MORE)],
)
def test_hosts_train_as_one_process(net, shared, alone, request, hosts):
    """Two that both have docker, on whose network MPI would wait for ever; and more."""
    if hosts not in _MORE:
        request.getfixturevalue("docker")
    path = shared / f"mpirun.{hosts}.npy"
    done = start(net, sys.executable, TRAIN, path, hosts=hosts)
    assert_trained(done, hosts, path, alone)


def test_a_network_that_leads_nowhere_ends_the_job(net, shared, docker):
    """At the stall limit, and it says how to name another one."""
    exclude = ["--mca", "btl_tcp_if_exclude", "127.0.0.1/8"]
    words = [*exclude, sys.executable, TRAIN, shared / "nowhere.npy"]
    done = start(net, *words, KERAS_DIST_STALL_SECONDS="10")
    assert done.returncode == 70, done.stderr
    assert "MPI has not connected the ranks for 10 s" in done.stderr
    assert "docker0" in done.stderr and "btl_tcp_if_include" in done.stderr
