"""The page of what left tells the truth: none of it is here any more."""

import importlib
import inspect
import re

import pytest
from launch import ROOT

import keras_dist
from keras_dist.__main__ import main

PAGE = (ROOT / "docs" / "what_left.md").read_text()

# The names in the first column of a table.
NAMES = [
    name
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


def test_the_page_has_all_kinds_of_names():
    """Arguments, names of Python, commands and options of the command line."""
    for kind in (r"\w+=", r"keras_dist\.\w+", r"keras-dist \w+", r"--\w+"):
        assert any(re.match(kind, name) for name in NAMES), kind


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("=")])
def test_an_argument_that_left_is_a_type_error(name):
    """As any name that Python does not know."""
    assert name.rstrip("=") not in inspect.signature(keras_dist.dist_fit).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        keras_dist.dist_fit(None, **{name.rstrip("="): 1})


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("keras_dist.")])
def test_a_name_that_left_cannot_be_imported(name):
    """Neither as a module nor as an attribute."""
    with pytest.raises(ImportError):
        importlib.import_module(name)
    owner, _, attribute = name.rpartition(".")
    assert not hasattr(importlib.import_module(owner), attribute)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.startswith(("-", "keras-dist "))]
)
def test_an_option_or_command_that_left_is_an_error(name, capsys):
    """argparse names the option, or the commands that there are."""
    words = name.split()[1:]  # none of an option
    with pytest.raises(SystemExit, match="2"):
        main(words or ["run", "-np", "1", name, "1", "script.py"])
    assert ("invalid choice" if words else "error:") in capsys.readouterr().err
