"""Tests in `ranks/` run under the launcher only."""

import os
import sys

import pytest

# TensorFlow's start-up lines hide the results, and several ranks run on two cores.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

collect_ignore = [] if "HOROVOD_SIZE" in os.environ else ["ranks"]


def pytest_collection_modifyitems(items):
    """Two lanes for `make test`: what starts ranks often waits, for seconds or a core.

    One has the launches of `ranks/`, the other one all else.
    """
    for item in items:
        is_long = item.path.name == "test_ranks.py"
        item.add_marker(pytest.mark.xdist_group("ranks" if is_long else "others"))


@pytest.fixture(scope="session")
def digits_on_two_ranks():
    """What `examples/digits.py` prints on two ranks, which several tests look at."""
    from launch import launch  # noqa: PLC0415 - no rank needs it

    command = [sys.executable, "examples/digits.py"]
    return launch(command, ranks=2, timeout=300)
