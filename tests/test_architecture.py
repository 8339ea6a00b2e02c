"""The floors hold: imports only go down, and one file imports Horovod."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import keras_dist

PACKAGE = Path(keras_dist.__file__).parent

# Room (a file or a folder): floor. A room may import rooms of its own floor that do not
# import it back, and those below.
FLOORS = {
    "version": 0,
    "mixin": 0,
    "scaling": 0,
    "plan": 0,
    "monitor": 0,
    "install": 0,
    "sharding": 1,
    "comm": 1,
    "optimizer": 2,
    "metrics": 2,
    "training": 3,
    "callbacks": 4,
    "setup": 5,
    "checkpoint": 6,
    "launch": 6,
    "tools": 6,
    "fit": 7,
    "distributed_model": 8,
    "__init__": 9,
    "__main__": 10,
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    """The room in which a file stands."""
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


def rooms_imported_by(path):
    """Rooms of this package that a file imports, other than its own."""
    parts = (name.split(".") for name in imports_of(path))
    rooms = {part[1] for part in parts if part[0] == "keras_dist" and len(part) > 1}
    return (rooms & set(FLOORS)) - {room_of(path)}


def test_every_file_has_a_floor():
    """A new room is welcome, with a place in the table."""
    assert {room_of(path) for path in FILES} <= set(FLOORS)


def test_imports_only_go_down():
    """No room imports one above it, and no two import each other."""
    edges = {
        (room_of(path), room) for path in FILES for room in rooms_imported_by(path)
    }
    for upper, lower in edges:
        assert FLOORS[lower] <= FLOORS[upper], f"{upper} imports {lower}"
        assert (lower, upper) not in edges, f"{upper} and {lower} import each other"


def test_only_the_door_imports_horovod():
    """Everything else runs where Horovod is not installed.

    The launcher's store, which needs no TensorFlow, is the other one.
    """
    importers = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] == "horovod" for name in imports_of(path))
    }
    assert importers == {"comm/transport.py", "launch/rendezvous.py"}


def test_no_private_door_is_used():
    """`keras.src` and `tensorflow.python` change without notice."""
    for path in FILES:
        for name in imports_of(path):
            assert not name.startswith(("keras.src", "tensorflow.python")), path


def test_rooms_keep_their_size():
    """A file over 300 lines, or a function over 40, has two reasons to change."""
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 300, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert length <= 40, f"{path}: {node.name} has {length} lines"


def test_all_public_names_exist():
    """`__all__` is sorted and complete."""
    assert list(keras_dist.__all__) == sorted(keras_dist.__all__)
    for name in keras_dist.__all__:
        assert getattr(keras_dist, name) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_in_docstrings_run(path):
    """Every `>>>` in the package is true."""
    name = ".".join(("keras_dist", *path.relative_to(PACKAGE).with_suffix("").parts))
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
