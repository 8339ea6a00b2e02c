"""Tests that ranks run are reported one by one, whatever becomes of the ranks."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from harness.launching import ROOT, launch

_TESTS = """
import os, signal, time
import pytest
pytestmark = pytest.mark.three_ranks
RANK = int(os.environ.get("HOROVOD_RANK", -1))

def test_first():
    assert RANK in range(3)

def test_that_fails_on_one():
    if RANK != 1:
        time.sleep(100)
    assert RANK == "the number of rank 1"

@pytest.mark.parametrize("value", ["a", "b"])
def test_between(value):
    print(os.getpid())

def test_that_crashes():
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.skip(reason="for no reason")
def test_skipped():
    pass

def test_that_hangs():
    while RANK == 0:
        time.sleep(1)

def test_last():
    pass
"""
_CONFTEST = """
from harness import rank_tests
pytest_configure = rank_tests.register
"""


@pytest.fixture
def tests(tmp_path):
    """A folder with the harness, and a folder of tests for ranks."""
    shutil.copytree(ROOT / "tests" / "harness", tmp_path / "tests" / "harness")
    ranks = tmp_path / "tests" / "ranks"
    ranks.mkdir()
    (ranks / "conftest.py").write_text(_CONFTEST)
    config = '[tool.pytest.ini_options]\npythonpath = ["tests"]\n'
    (tmp_path / "pyproject.toml").write_text(config)
    return ranks


def run(tests: Path, text: str, *options: str) -> str:
    """What pytest prints about tests of a file."""
    (tests / "test_ways.py").write_text(text)
    command = f"cd {tests.parents[1]} && exec {sys.executable} -m pytest -v"
    env = {"PYTHONPATH": f"{ROOT}", "COLUMNS": "200"}
    return launch(["sh", "-c", " ".join([command, *options])], env=env).stdout


def outcomes(output: str) -> dict[str, str]:
    """How each test has ended, by its name."""
    return dict(re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED)", output))


def test_a_rank_that_fails_crashes_or_hangs_fails_the_test_that_it_ran(tests):
    """The rest runs on new ranks; the failing rank's traceback is shown."""
    harness = tests.parent / "harness" / "rank_tests.py"
    harness.write_text(harness.read_text().replace("LIMIT = 900", "LIMIT = 15"))
    output = run(tests, _TESTS)
    assert outcomes(output) == {
        "test_first[np3]": "PASSED",
        "test_that_fails_on_one[np3]": "FAILED",
        "test_between[np3-a]": "PASSED",
        "test_between[np3-b]": "PASSED",
        "test_that_crashes[np3]": "FAILED",
        "test_skipped[np3]": "SKIPPED",
        "test_that_hangs[np3]": "FAILED",
        "test_last[np3]": "PASSED",
    }, output
    assert "assert 1 == 'the number of rank 1'" in output
    assert "Without a result of rank 2" in output
    assert "Segmentation fault" in output
    assert "No rank has ended a test for 15 s" in output
    assert re.search(r'File ".*test_ways.py", line \d+ in test_that_hangs', output)


def test_ranks_that_never_pass_a_test_are_not_started_for_each(tests):
    """After three launches the rest is reported as not run."""
    text = "import os\nif 'HOROVOD_RANK' in os.environ: raise OSError('too late')\n"
    names = "abcdef"
    text += "import pytest\npytestmark = pytest.mark.three_ranks\n"
    text += "".join(f"def test_{name}(): pass\n" for name in names)
    output = run(tests, text)
    assert set(outcomes(output).values()) == {"FAILED"}
    assert output.count("too late") >= 3
    assert len(re.findall(r"^Not run: 3 launches have failed", output, re.M)) == 3


def test_a_test_that_ranks_do_not_have_fails_alone(tests):
    """The others have their results from the same launch."""
    text = "import os, pytest\npytestmark = pytest.mark.three_ranks\n"
    text += "if 'HOROVOD_RANK' not in os.environ:\n    def test_a(): pass\n"
    starts = tests / "starts"
    text += f"def test_b(): open({str(starts)!r}, 'a').write('b')\n"
    found = {name[:6]: end for name, end in outcomes(run(tests, text)).items()}
    assert found == {"test_a": "FAILED", "test_b": "PASSED"}
    assert starts.read_text() == "bbb"
