"""The pages that quote the package quote what it says: errors, codes, variables."""

import ast
import re
from pathlib import Path

import pytest
from harness.pages import DOCS

import keras_dist
from keras_dist.checkpoint import EXIT_CODE as SAVED
from keras_dist.launch.monitor.watchdog import EXIT_CODE as STALLED

PACKAGE = Path(keras_dist.__file__).parent
TROUBLES = (DOCS / "troubleshooting.md").read_text()
ENVIRONMENT = (DOCS / "reference" / "environment.md").read_text()

# What other programs say, and what has no text of its own.
_FOREIGN = ("Exit codes", "Messages of other programs")


def template(node):
    """The constant text of a string, with \\0 for what is filled in; else `None`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "\0" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join(s or "\0" for s in sides)
    return None


def templates():
    """All strings of the package but its docstrings."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        found |= {template(n) for n in nodes if id(n) not in docstrings}
    return found - {None}


def pattern(key):
    """Finds the pieces of a key, in their order."""
    pieces = [re.escape(piece.strip()) for piece in key.split("…") if piece.strip()]
    return re.compile(".*".join(pieces), re.DOTALL)


def keys():
    """The texts of ours under which the page can be searched."""
    found = []
    for section in TROUBLES.split("\n## ")[1:]:
        if section.startswith(_FOREIGN):
            continue
        for line in section.splitlines():
            cell = re.match(r"### (.*)|\| (.*?) \|", line)
            spans = re.findall(r"``(.+?)``|`([^`]+)`", cell[0] if cell else "")
            texts = [(double or single).strip() for double, single in spans]
            found += [text for text in texts if " " in text]  # no names of arguments
    return found


def test_the_page_quotes_the_source():
    """Every error text that is a heading, or a first cell, is what the code says."""
    known = templates()
    assert len(keys()) > 30
    stale = [k for k in keys() if not any(map(pattern(k).search, known))]
    assert not stale


@pytest.mark.parametrize("code", [STALLED, SAVED])
def test_exit_codes_are_on_the_page(code):
    """Ours, with a heading each."""
    assert f"### Exit code {code}\n" in TROUBLES


def test_every_variable_of_the_environment_is_listed():
    """What the package reads or sets, by the look of its name."""
    name = re.compile(
        r"(?<![A-Z_])(?:(?:KERAS_DIST|HOROVOD|NCCL|CUDA|OMPI|PMIX?|MPI|TF)_[A-Z_]*[A-Z]"
        r"|[A-Z]+_NUM_THREADS)"
    )
    used = {found for text in templates() for found in name.findall(text)}
    assert {"KERAS_DIST_STALL_SECONDS", "KERAS_DIST_RECORD", "HOROVOD_RANK"} <= used
    listed = set(name.findall(ENVIRONMENT))
    assert not used - listed
    assert not {n for n in listed if n.startswith("KERAS_DIST_")} - used
