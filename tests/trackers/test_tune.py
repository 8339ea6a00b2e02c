"""The recipes of the page on hyperparameters run, and find what one rank finds."""

import ast
import sys

import pytest
from harness.launching import PYTHONPATH, launch, write_script
from harness.needs import needs
from harness.pages import DOCS, blocks

pytestmark = needs("libraries", "optuna")

_SCRIPTS = [code for _, code in blocks(DOCS / "how_to" / "tune.md", "py")]


@pytest.mark.parametrize("library", ["optuna", "keras_tuner"])
def test_a_search_on_two_ranks_is_that_of_one(library, tmp_path):
    """The same values of all trials, and the same best hyperparameters."""
    pytest.importorskip(library)  # `make clusters` has Optuna alone
    (code,) = (code for code in _SCRIPTS if f"import {library}\n" in code)
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert "np=2" in code
        write_script(folder, code.replace("np=2", f"np={ranks}"), "search.py")
        words = ["env", "-C", folder, sys.executable, "search.py"]
        done = launch(words, env={"PYTHONPATH": PYTHONPATH}, check=True)
        text = done.stdout.splitlines()[-1]
        values, _, best = text.partition("] ")
        found.append((ast.literal_eval(f"{values}]"), ast.literal_eval(best)))
    (one, best_of_one), (two, best_of_two) = found
    assert len(one) == 3 and len(set(one)) > 1
    assert two == pytest.approx(one, rel=1e-4)
    assert best_of_two == best_of_one
