"""Fixtures of this folder."""

import contextlib
import uuid

import psutil
import pytest

from keras_dist.launch.store import Store, find_store, store_variables


@pytest.fixture
def left_behind(monkeypatch):
    """Returns a function that lists what a test has started and is still there.

    At the end of the test nothing may be.
    """
    monkeypatch.setenv("MARK_OF_TEST", mark := uuid.uuid4().hex)

    def find():
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MARK_OF_TEST") == mark:
                    found.append(process.cmdline())
        return found

    yield find
    assert find() == []


@pytest.fixture
def store():
    """The store of a job whose secret is "secret"."""
    store = Store("secret")
    yield store
    store.shutdown()


@pytest.fixture
def variables(store):
    """The variables by which ranks find it."""
    return store_variables("127.0.0.1", store.port, "secret")


@pytest.fixture
def client(variables):
    """What a rank has of it."""
    return find_store(variables)
