"""A test that is skipped for a reason that CI does not expect fails the run."""

import re
import sys

import pytest
from harness.launching import ROOT, launch

_TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="left out: torch missing (make clusters)")
def test_for_clusters():
    pass

@pytest.mark.skipif(True, reason="munge missing")
def test_for_slurm():
    pass

def test_while_it_runs():
    pytest.skip("no sshd")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
_MODULE = 'import pytest\npytest.importorskip("a_module_that_is_not_there")\n'
_CONFTEST = "from harness import skips\npytest_configure = skips.register\n"

_CLUSTERS, _TWO = r"make (clusters|libraries)", {"munge missing", "no sshd"}


@pytest.mark.parametrize(
    ("expected", "options", "has_module", "unexpected"),
    [
        (None, [], True, set()),  # outside of CI
        (_CLUSTERS, [], False, _TWO),
        (_CLUSTERS, ["-n2"], True, {*_TWO, "a_module_that_is_not_there"}),
        (f"{_CLUSTERS}|munge|sshd", [], False, set()),
        ("", [], True, set()),  # a pattern that all reasons fit
        ("nothing", ["-k", "passes or known"], False, set()),
    ],
)
def test_a_skip_that_nobody_expected_fails_the_run(
    tmp_path, expected, options, has_module, unexpected
):
    """Of a test, of a file, and where workers of xdist run the tests."""
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    if has_module:
        (tmp_path / "test_module.py").write_text(_MODULE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tmp_path]
    env = {"PYTHONPATH": f"{ROOT}/tests", "COLUMNS": "200"}
    env |= {} if expected is None else {"EXPECTED_SKIPS": expected}
    done = launch([*command, *options], env=env)
    assert done.returncode == bool(unexpected), done.stdout
    found = re.findall(r"^skipped, not expected: .*", done.stdout, re.MULTILINE)
    assert len(found) == len(unexpected), done.stdout
    assert all(any(reason in line for line in found) for reason in unexpected)
