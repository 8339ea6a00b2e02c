"""Runs `tests/ranks/` under the launcher, on 1, 2 and 3 ranks.

With two ranks alone, many mistakes in order and divisibility cancel out.
"""

import sys
from pathlib import Path

import pytest
from launch import launch

FILES = sorted((Path(__file__).parent / "ranks").glob("test_*.py"))
_ONE = [file for file in FILES if file.stem == "test_equivalence"]

# What may differ between the transports: all collectives, and errors of one rank.
_LINKS = "test_comm", "test_transport", "test_one_rank_fails"
_OWN = [file for file in FILES if file.stem in _LINKS]


@pytest.mark.parametrize(
    ("size", "files", "launcher"),
    [
        pytest.param(1, _ONE, "keras-dist", id="1-one"),
        pytest.param(1, FILES, "keras-dist", id="1-all", marks=pytest.mark.long),
        # A process gets slower with each test, since TensorFlow keeps their functions.
        *(
            pytest.param(2, FILES[part::3], "horovodrun", id=f"2-part-{part}")
            for part in range(3)
        ),
        *(
            pytest.param(3, FILES[part::2], "keras-dist", id=f"3-part-{part}")
            for part in range(2)
        ),
    ],
)
def test_all_ranks_pass_their_tests(size, files, launcher):
    """Every rank runs every test; a hang is a failure, after a time limit."""
    run_files(files, size, launcher)


@pytest.mark.parametrize(
    ("size", "files"),
    [
        pytest.param(3, _OWN, id="3-tensorflow"),
        *(
            pytest.param(2, FILES[part::3], id=f"2-own-{part}", marks=pytest.mark.long)
            for part in range(3)
        ),
        *(
            pytest.param(3, FILES[part::3], id=f"3-own-{part}", marks=pytest.mark.long)
            for part in range(3)
        ),
    ],
)
def test_all_ranks_pass_their_tests_over_tensorflow(size, files):
    """Over its own collectives as over Horovod."""
    env = {"KERAS_DIST_TRANSPORT": "tensorflow"}
    run_files(files, size, "keras-dist", env=env)


def run_files(files, size, launcher, env=None):
    words = [sys.executable, "-m", "pytest", "-x", "-q", *files]
    given = {"timeout": 1800, "launcher": launcher, "check": True, "env": env}
    launch(words, ranks=size, **given)
