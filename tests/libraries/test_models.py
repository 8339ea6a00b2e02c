"""Models of libraries equal one process, after a training on several ranks."""

import sys

import pytest
from launch import launch
from needs import LIBRARIES, needs

pytestmark = needs("libraries", *LIBRARIES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_models_equal_one_process(ranks):
    """All ranks train each model of `tests/ranks/library_ways/`, in one launch."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "tests/ranks/libraries.py"]
    # Else a test runs on one number of ranks alone.
    done = launch(command, ranks=ranks, timeout=1800, env={"LONG_TESTS": "1"})
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
