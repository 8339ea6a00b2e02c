"""The public names of the installed Keras 3, read from its files without importing it.

`tf.keras` has names that `keras` has not, such as `backend.mean`, and the other way
round, such as `losses.mean_squared_error`.
"""

import ast
import functools
import importlib.util
import os
from pathlib import Path

_PRIVATE = ("src", "api")


@functools.cache
def _api(*, is_tf: bool) -> dict[str, frozenset[str]]:
    """Return the public names of each module of `keras`, or of `tf.keras`."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    if (folder / "api").is_dir():
        folder /= "api"
    if is_tf:
        folder = folder / "_tf_keras" / "keras"
    found = {}
    for path, folders, files in os.walk(folder):
        inner = [one for one in folders if not one.startswith("_")]
        folders[:] = [one for one in inner if one not in _PRIVATE]
        if "__init__.py" in files:
            module = f"keras.{Path(path).relative_to(folder)}".replace(os.sep, ".")
            module = module.rstrip(".")
            found[module] = frozenset(_names_of(Path(path) / "__init__.py"))
    return found


def _names_of(file: Path) -> set[str]:
    """Return the names that a file imports."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def missing(name: str, *, is_tf: bool, is_import: bool = False) -> str | None:
    """Return the part of a name up to the first word that Keras 3 does not have.

    Args:
        name: A name that begins with "keras.".
        is_tf: Whether a script has it from `tf.keras`.
        is_import: Whether an import asks for it, which finds `tensorflow.keras.saving`,
            for example; as an attribute, `tf.keras` does not have it.

    Returns:
        `None` if Keras 3 has the name, or if this cannot be known: it is private, or a
        member of a class.

    >>> missing("keras.layers.experimental.preprocessing.Rescaling", is_tf=True)
    'keras.layers.experimental'
    >>> missing("keras.layers.Dense.anything", is_tf=True)
    """
    api = _api(is_tf=is_tf)
    words = name.split(".")
    for index, word in enumerate(words[1:], start=1):
        names = api.get(".".join(words[:index]))
        if names is None or word.startswith("_") or word in _PRIVATE:
            return None
        inner = ".".join(words[: index + 1])
        if word not in names and not (is_import and inner in api):
            return inner
    return None


def instead(name: str, *, is_tf: bool) -> str | None:
    """Return a name of Keras 3 that ends as a missing one does, if there is one.

    Args:
        name: The missing name.
        is_tf: Whether a script has it from `tf.keras`.

    >>> instead("keras.layers.experimental.preprocessing.Rescaling", is_tf=True)
    'tf.keras.layers.Rescaling'
    >>> instead("keras.backend.mean", is_tf=False)
    'keras.ops.mean'
    """
    *_, package, last = name.split(".")
    if package == "backend" and last in _api(is_tf=False).get("keras.ops", ()):
        return f"keras.ops.{last}"
    if missing(name, is_tf=not is_tf) is None and _api(is_tf=not is_tf):
        return name if is_tf else f"tf.{name}"
    prefix = "tf." if is_tf else ""
    modules = [module for module, names in _api(is_tf=is_tf).items() if last in names]
    modules.sort(key=lambda module: (package not in module, len(module), module))
    # Words in small letters may mean something else in another module.
    return f"{prefix}{modules[0]}.{last}" if last[:1].isupper() and modules else None
