"""Hosts for the tests of this folder; without root they are left out, and say so."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness import network
from harness.on_hosts import TRAIN

_MISSING = network.missing()


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    if _MISSING:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"left out: {_MISSING}"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all hosts see."""
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture
def folder(shared):
    """A folder of a test's own that all hosts see."""
    return Path(tempfile.mkdtemp(dir=shared))


@pytest.fixture(scope="session")
def running(shared):
    """Eight hosts for all tests of the session."""
    with network.hosts("abcdefgh", shared=[shared]) as net:
        yield net


@pytest.fixture
def net(running):
    """The hosts, as they were at first: names, links and firewalls."""
    yield running
    running.restore()


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
