"""Runs `tests/ranks/` under the launcher, on 1, 2 and 3 ranks.

With two ranks alone, many mistakes in order and divisibility cancel out.
"""

import sys
from pathlib import Path

import pytest
from launch import launch

FILES = sorted((Path(__file__).parent / "ranks").glob("test_*.py"))

# Those for two ranks are two launches: one by `horovodrun`.
_HALF = next(i for i, file in enumerate(FILES) if file.name > "test_n")
_ONE = [file for file in FILES if file.stem == "test_equivalence"]
_FILES = {"all": FILES, "a-m": FILES[:_HALF], "n-z": FILES[_HALF:], "one": _ONE}


@pytest.mark.parametrize(
    ("size", "files"),
    [
        (1, "one"),
        pytest.param(1, "all", marks=pytest.mark.long),
        (2, "a-m"),
        (2, "n-z"),
        (3, "all"),
    ],
)
def test_all_ranks_pass_their_tests(size, files):
    """Every rank runs every test; a hang is a failure, after a time limit."""
    done = launch(
        [sys.executable, "-m", "pytest", "-x", "-q", *map(str, _FILES[files])],
        ranks=size,
        timeout=1800,
        launcher="horovodrun" if files == "a-m" else "keras-dist",
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
