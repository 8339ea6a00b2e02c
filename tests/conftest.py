"""Tests in `ranks/` run under the launcher only."""

import os
import sys

import pytest

# TensorFlow's start-up lines hide the results, and several ranks run on two cores.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

collect_ignore = [] if "HOROVOD_SIZE" in os.environ else ["ranks"]


def pytest_configure(config):
    """Register marks; that of the lanes where there is no xdist, too."""
    config.addinivalue_line("markers", "long: run with LONG_TESTS=1, as by `make long`")
    config.addinivalue_line("markers", "xdist_group(name): the lane, see below")


@pytest.hookimpl(tryfirst=True)  # else xdist has read the marks before
def pytest_collection_modifyitems(config, items):
    """Two lanes for `make test`: what starts ranks often waits, for seconds or a core.

    One has the launches of `ranks/` but for half of those on two ranks, the other one
    all else.
    """
    if not os.environ.get("LONG_TESTS"):
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    for item in items:
        is_long = item.path.name == "test_ranks.py" and "n-z" not in item.name
        item.add_marker(pytest.mark.xdist_group("ranks" if is_long else "others"))


@pytest.fixture(scope="session")
def digits_on_two_ranks():
    """What `examples/digits.py` prints on two ranks, which several tests look at."""
    from launch import launch  # noqa: PLC0415 - no rank needs it

    command = [sys.executable, "examples/digits.py"]
    return launch(command, ranks=2, timeout=300)
