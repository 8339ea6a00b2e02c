"""What tests of several folders share."""

import os
from pathlib import Path

import pytest
from harness import skips
from harness.forked import forks, run_ranks

__all__ = ["forks", "run_ranks"]

# TensorFlow's start-up lines hide the results, and several ranks run on two cores.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Every process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every Python that a test starts collects garbage less often (startup/).
_FIRST = str(Path(__file__).with_name("startup"))
_PATHS = [_FIRST, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATHS))


def pytest_configure(config):
    """Register the mark of tests for which `make test` has no time."""
    config.addinivalue_line("markers", "long: run with LONG_TESTS=1 alone")
    skips.register(config)


def pytest_collection_modifyitems(config, items):
    """Leave out what takes long, unless it is asked for."""
    if not os.environ.get("LONG_TESTS"):
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Lanes for `make test`: what starts ranks often waits, if only for a core."""
    from harness.lanes import Lanes  # noqa: PLC0415 - where there is xdist

    return Lanes(config, log)


_RUN = ("examples/digits.py", "examples/files.py files", "examples/train_step.py")


@pytest.fixture(scope="session")
def on_one_process(tmp_path_factory):
    """What the README, a page and examples print, by their names."""
    from harness import pages  # noqa: PLC0415 - no rank needs it

    shown = ["README.md", "docs/how_to/trainers.md", *_RUN]
    return pages.run_all(shown, tmp_path_factory.mktemp("one"), None)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder in which scripts of `on_two_ranks` write."""
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory, written):
    """What examples and pages print there, by their names."""
    from harness import pages  # noqa: PLC0415 - no rank needs it

    shown = [*_RUN, "examples/callbacks_only.py", pages.write_digits(written)]
    if pages.has_fashion_mnist():
        options = f"--rows 256 --log-dir {written} --target-accuracy 0 --patience 2"
        shown.append(f"examples/fashion_mnist.py {options}")
    return pages.run_all(
        [*shown, *pages.with_snippets()], tmp_path_factory.mktemp("two"), 2
    )
