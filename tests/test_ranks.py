"""Runs `tests/ranks/` under the launcher, on 1, 2 and 3 ranks.

With two ranks alone, many mistakes in order and divisibility cancel out.
"""

import sys
from pathlib import Path

import pytest
from launch import launch

FOLDER = Path(__file__).parent / "ranks"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together(size):
    """Every rank runs every test; a hang is a failure and not a wait."""

    done = launch(
        [sys.executable, "-m", "pytest", "-x", "-q", str(FOLDER)],
        ranks=size,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
