"""Runs `tests/ranks/` under the launcher, on 1, 2 and 3 ranks.

With two ranks alone, many mistakes in order and divisibility cancel out.
"""

import sys
from pathlib import Path

import pytest
from launch import launch

FOLDER = Path(__file__).parent / "ranks"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_pass_their_tests(size):
    """Every rank runs every test; a hang is a failure, after a time limit."""
    done = launch(
        [sys.executable, "-m", "pytest", "-x", "-q", str(FOLDER)],
        ranks=size,
        timeout=1800,
        launcher="horovodrun" if size == 2 else "keras-dist",
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
