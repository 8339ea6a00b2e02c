"""Hosts for the tests of this folder; without root they are left out, and say so."""

import tempfile
from pathlib import Path

import network
import pytest

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
