"""Training on several hosts gives the weights of one process."""

import json
import re
import sys
from importlib import metadata

import numpy as np
import pytest
from launch import RUN

from keras_dist.tools.install.build import digest_patches

TRAIN = "tests/hosts/train.py"

# Weights that each rank prints: rank, local rank, local size, host, digest.
_FOUND = re.compile(r"found (\[.*\])")


def found_of(stdout, ranks):
    """What all ranks have printed, sorted; their weights are the same bits."""
    found = sorted(json.loads(text) for text in _FOUND.findall(stdout))
    assert [each[0] for each in found] == list(range(ranks)), stdout
    assert len({each[4] for each in found}) == 1, found
    return [tuple(each[1:4]) for each in found]


@pytest.fixture(scope="module")
def alone(running, shared):
    """Weights of plain Keras on one process, with the batch of so many ranks."""
    known = {}

    def weights(ranks):
        if ranks not in known:
            path = shared / f"alone{ranks}.npy"
            done = running.run("c", [sys.executable, TRAIN, path, ranks])
            assert done.returncode == 0, done.stderr
            known[ranks] = np.load(path)
        return known[ranks]

    return weights


def assert_equal(path, expected):
    """The ranks' weights equal one process, but for the order of sums."""
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-4, atol=1e-6)


def count_ranks(hosts):
    """How many ranks hosts such as "a:1,b:2" have."""
    return sum(int(each[2:]) for each in hosts.split(","))


def assert_trained(done, hosts, path, alone):
    """Each rank knows its place, and has the weights of plain Keras."""
    counts = {each[0]: int(each[2:]) for each in hosts.split(",")}
    assert done.returncode == 0, done.stderr
    assert f"{count_ranks(hosts)} on {len(counts)} hosts" in done.stdout
    assert found_of(done.stdout, count_ranks(hosts)) == [
        (local, count, host) for host, count in counts.items() for local in range(count)
    ]
    assert_equal(path, alone(count_ranks(hosts)))


def debian_names(net):
    """Own names are 127.0.1.1, as Debian's installer has it; that of b is unknown."""
    for name in net.names:
        others = [f"{net.address(o)} {o}\n" for o in net.names if o != name]
        own = [] if name == "b" else [f"127.0.1.1 {name}\n"]
        net.write_hosts(name, "".join(["127.0.0.1 localhost\n", *own, *others]))


@pytest.mark.skipif(
    not metadata.version("horovod").endswith(digest_patches()),
    reason="left out: Horovod has no patch",
)
def test_three_ranks_on_two_hosts_use_the_network_that_is_named(net, shared, alone):
    """One and two, with Debian's own names, and gradients on the second network."""
    debian_names(net)
    before = [[net.bytes_of(name, n) for n in (0, 1)] for name in "ab"]
    path = shared / "three.npy"
    options = ["--rdzv", f"{net.address('a', 1)}:29400", "-H", "a:1,b:2"]
    done = net.run("a", [*RUN, *options, TRAIN, path])
    assert_trained(done, "a:1,b:2", path, alone)
    for name, (first, second) in zip("ab", before, strict=True):
        assert net.bytes_of(name, 0) - first < 500_000  # ssh, to b
        assert net.bytes_of(name, 1) - second > 10_000_000
