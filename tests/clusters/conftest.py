"""Ray, Spark and Kubernetes; left out, with a line, where what they need is not there.

`make clusters` installs it into an environment of its own, and runs these tests.
"""

import importlib.util
import os
import shutil
import time
from pathlib import Path

import pytest
from leftover import MARK, left

os.environ[MARK] = str(os.getpid())

# What each file needs: modules, and programs.
_NEEDS = {
    "test_ray": (("ray",), ()),
    "test_spark": (("pyspark",), ("java",)),
    "test_schemas": (("kubernetes_validate",), ()),
}


def _missing(stem):
    modules, programs = _NEEDS[stem]
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return absent + [name for name in programs if shutil.which(name) is None]


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    for item in items:
        if Path(__file__).parent == item.path.parent and (
            missing := _missing(item.path.stem)
        ):
            reason = f"left out: {', '.join(missing)} missing (make clusters)"
            item.add_marker(pytest.mark.skip(reason=reason))


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
