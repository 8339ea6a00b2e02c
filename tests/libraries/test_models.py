"""Models of libraries are those of one process, after a training on two ranks."""

import sys

from launch import launch


def test_all_models_equal_one_process():
    """Both ranks train each model of `tests/ranks/library_ways/`, in one launch."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "tests/ranks/libraries.py"]
    done = launch(command, ranks=2, timeout=1800)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
