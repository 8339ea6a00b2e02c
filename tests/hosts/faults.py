"""More launches and longer faults on hosts, for `make hosts`."""

import sys
from pathlib import Path

import pytest
from network import LAUNCH
from test_training import TRAIN, alone, assert_equal, found_of

__all__ = ["alone"]  # a fixture

HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo"]


@pytest.mark.parametrize("hosts", ["a:1,b:1", "a:2,b:2", "a:1,b:1,c:1"])
@pytest.mark.parametrize("launcher", ["keras-dist run", "horovodrun"])
def test_both_launchers_train_as_one_process(net, shared, alone, launcher, hosts):
    """On two hosts with one and two ranks, and on three."""
    counts = [int(each.split(":")[1]) for each in hosts.split(",")]
    ranks, path = sum(counts), shared / "launched.npy"
    words = [*LAUNCH, "-H", hosts, TRAIN, path]
    if launcher == "horovodrun":
        words = [*HOROVODRUN, "--disable-cache", "-np", ranks, "-H", hosts]
        words += [sys.executable, TRAIN, path]
    done = net.run("a", words, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} on {len(counts)} hosts" in done.stdout
    expected = [(k, n, h) for h, n in zip("abc", counts) for k in range(n)]  # noqa: B905
    assert found_of(done.stdout, ranks) == expected
    assert_equal(path, alone(ranks))
