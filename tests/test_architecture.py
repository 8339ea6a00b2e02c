"""Imports only go down, one file imports Horovod, and state has one owner."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
from pathlib import Path

import pytest
from mutations import MUTATIONS

import keras_dist

PACKAGE = Path(keras_dist.__file__).parent

# Each folder and file at the top of the package; a line is a layer, the lowest first.
# It may import others of its own layer that do not import it back, and those below.
_TABLE = """
version allocator mixin private lines errors plan data clusters
launch
comm
optimizer
training
callbacks
setup
checkpoint
fit
distribution horovod tools
__init__
__main__
"""
LAYERS = {n: k for k, line in enumerate(_TABLE.split("\n")) for n in line.split()}

FILES = sorted(PACKAGE.rglob("*.py"))


def member_of(path):
    """The folder at the top of the package in which a file is, or the file itself."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path):
    """All modules that a file imports, also by name with importlib."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def members_imported_by(path):
    """Folders and files at the top that a file imports, other than its own."""
    parts = (name.split(".") for name in imports_of(path))
    found = {part[1] for part in parts if part[0] == "keras_dist" and len(part) > 1}
    return (found & set(LAYERS)) - {member_of(path)}


def test_every_file_has_a_layer():
    """A new folder is welcome, with its name in the table."""
    assert {member_of(path) for path in FILES} <= set(LAYERS)


def test_imports_only_go_down():
    """No folder imports one above it, and no two import each other."""
    edges = {
        (member_of(path), name) for path in FILES for name in members_imported_by(path)
    }
    for upper, lower in edges:
        assert LAYERS[lower] <= LAYERS[upper], f"{upper} imports {lower}"
        assert (lower, upper) not in edges, f"{upper} and {lower} import each other"


def test_only_one_file_imports_horovod():
    """Everything else runs where Horovod is not installed."""
    importers = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] == "horovod" for name in imports_of(path))
    }
    assert importers == {"comm/horovod_transport.py"}


def test_no_private_module_is_imported():
    """`keras.src` and `tensorflow.python` change without notice."""
    for path in FILES:
        for name in imports_of(path):
            assert not name.startswith(("keras.src", "tensorflow.python")), path


def test_state_is_changed_by_its_owner():
    """Nobody sets an attribute of another object of the package's session."""
    session = PACKAGE / "training" / "session.py"
    classes = [n for n in ast.parse(session.read_text()).body if hasattr(n, "bases")]
    session_class = next(node for node in classes if node.name == "Session")
    fields = {n.target.id for n in session_class.body if isinstance(n, ast.AnnAssign)}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value).split(".")[-1]
                assert owner not in fields, f"{path}: {node.attr}"


def test_one_context_variable_carries_a_step():
    """From the train step through Keras into `apply`; there is no second way."""
    folders = ("training", "optimizer")
    made = [
        path
        for path in FILES
        if member_of(path) in folders
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ContextVar")
    ]
    assert [path.name for path in made] == ["step_context.py"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_each_mutation_breaks_a_line_that_is_there(mutation):
    """Each line that tests/studies/mutations.txt replaces occurs once in its file."""
    assert (PACKAGE / mutation.file).read_text().count(mutation.line) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_in_docstrings_run(path, monkeypatch):
    """Every `>>>` in the package is true."""
    name = ".".join(("keras_dist", *path.relative_to(PACKAGE).with_suffix("").parts))
    module = importlib.import_module(name.removesuffix(".__init__"))
    decorated = {  # doctest takes them for functions of another module
        name: inspect.unwrap(found)
        for name, found in vars(module).items()
        if hasattr(found, "__wrapped__") and found.__module__ == module.__name__
    }
    monkeypatch.setattr(module, "__test__", decorated, raising=False)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize("number", range(4))
def test_a_lane_has_one_worker(number, tmp_path_factory):
    """Else the tests of SLURM, of which each has the same ports, run side by side."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    base = tmp_path_factory.getbasetemp()
    (base / f"lane {worker}").touch()
    all_workers = base.parent.glob("popen-*/lane *") if worker else base.glob("lane *")
    assert len(list(all_workers)) == 1


def scripts():
    """What runs beside the package and its tests, and is seldom run."""
    root = PACKAGE.parent
    for folder in ("benchmarks", "examples", "tests/studies", "tests/hosts"):
        yield from sorted((root / folder).rglob("*.py"))


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_a_script_uses_names_that_are_there(path):
    """A benchmark must not fail months later, because a module was renamed."""
    text = path.read_text()
    for name in imports_of(path) | set(re.findall(r"\bkeras_dist(?:\.\w+)+", text)):
        if name.split(".")[0] == "keras_dist" and not name.endswith((".py", ".svg")):
            pkgutil.resolve_name(name)
