"""Training on several hosts gives the weights of one process."""

from importlib import metadata

import pytest
from harness.launching import RUN
from harness.on_hosts import TRAIN, assert_trained

from keras_dist.tools.install.build import digest_patches


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
