"""Write `keras_2_names.txt`: the public names of Keras 2, by its own API files.

    pip download --no-deps keras==2.15.0
    python tests/keras_2_names.py keras-2.15.0-py3-none-any.whl

A line is a module and its names.
"""

import ast
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

_FOLDERS = (
    "keras/api/_v2/",
    "keras/api/_v1/",
)  # of `tf.keras` and `tf.compat.v1.keras`


def names_of(wheel: str) -> dict[str, set[str]]:
    """Return the public names of each module of Keras 2."""
    found = defaultdict(set)
    with zipfile.ZipFile(wheel) as files:
        for path in files.namelist():
            folder = next((one for one in _FOLDERS if path.startswith(one)), None)
            if folder is None or not path.endswith("__init__.py"):
                continue
            module = path.removeprefix(folder).removesuffix("/__init__.py")
            if not module.startswith("keras") or "/_" in module:
                continue
            found[module.replace("/", ".")] |= {
                alias.asname or alias.name
                for node in ast.walk(ast.parse(files.read(path)))
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                if not (alias.asname or alias.name).startswith("_")
            }
    return found


if __name__ == "__main__":
    lines = [
        " ".join([module, *sorted(names)])
        for module, names in sorted(names_of(sys.argv[1]).items())
        if names
    ]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_suffix(".txt").write_text(text)
