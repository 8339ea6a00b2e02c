"""Ray, Spark and Kubernetes; left out, with a line, where what they need is not there.

`make clusters` installs it into an environment of its own, and runs these tests.
"""

import os
import time

import pytest
from leftover import MARK, left
from needs import leave_out

os.environ[MARK] = str(os.getpid())

# What each file needs: modules, and programs.
_MODULES = {
    "test_ray": ("ray",),
    "test_spark": ("pyspark",),
    "test_schemas": ("kubernetes_validate",),
}
_PROGRAMS = {"test_spark": ("java",)}


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, _MODULES, _PROGRAMS)


@pytest.fixture
def nothing_left():
    """After the test no process of a job is there, at the latest after 10 s."""
    yield
    begin = time.monotonic()
    while left() and time.monotonic() - begin < 10:
        time.sleep(0.1)
    assert not left()


@pytest.fixture(scope="session")
def expected():
    """Weights of plain Keras on one process, with the batch of two ranks."""
    import calls  # noqa: PLC0415 - no TensorFlow where all is left out

    return calls.weights_of(2, calls.by_keras)
