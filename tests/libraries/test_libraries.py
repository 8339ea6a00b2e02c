"""Models of KerasHub, KerasRS and `keras.applications` equal one process; pages run."""

import os
import sys

import pytest
from harness.launching import ROOT, launch
from harness.needs import LIBRARIES, needs
from harness.pages import ALONE, blocks, named

pytestmark = needs("libraries", *LIBRARIES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_models_equal_one_process(ranks):
    """Each model of `tests/harness/library_ways/`, on two or on three ranks.

    `LONG_TESTS=1 make libraries` trains each on both.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "tests/ranks/libraries.py"]
    launch(command, ranks=ranks, timeout=1800, check=True)


def test_the_script_of_each_page_runs_on_two_ranks(tmp_path):
    """As it stands, with small models in place of presets, which are downloaded."""
    pages = sorted(ALONE.glob("*.md"))
    assert pages and all(blocks(page, "py") for page in pages)
    names = ["tests/libraries/presets.py", *map(named, pages)]
    paths = [str(ROOT / "tests"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    words = ["tests/harness/pages.py", tmp_path, *names]
    done = launch(words, ranks=2, timeout=600, env=env, check=True)
    assert all(f"== {name}" in done.stdout for name in names)
