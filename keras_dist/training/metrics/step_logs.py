"""What a train or test step returns to be logged: values in dicts, lists and tuples."""

from collections.abc import Callable, Mapping
from typing import Any

# Names of dicts and indices of lists on the way to a value.
Path = tuple[Any, ...]


def leaves_of(logs: Any, path: Path = ()) -> dict[Path, Any]:
    """Return the values in some logs, each by its path.

    >>> leaves_of({"loss": 1, "compile_metrics": {"mae": 2, "pair": [3, None]}})
    {('loss',): 1, ('compile_metrics', 'mae'): 2, ('compile_metrics', 'pair', 0): 3, \
('compile_metrics', 'pair', 1): None}
    """
    if isinstance(logs, Mapping):
        inner = logs.items()
    elif isinstance(logs, (list, tuple)):
        inner = enumerate(logs)  # type: ignore[assignment]
    else:
        return {path: logs}
    leaves: dict[Path, Any] = {}
    for name, value in inner:
        leaves |= leaves_of(value, (*path, name))
    return leaves


def map_leaves(function: Callable[[Path, Any], Any], logs: Any, path: Path = ()) -> Any:
    """Return the same structure, with `function(path, value)` for each value.

    >>> map_leaves(lambda path, value: value * 10, {"a": 1, "b": (2, [3])})
    {'a': 10, 'b': (20, [30])}
    """
    if isinstance(logs, Mapping):
        return {
            name: map_leaves(function, value, (*path, name))
            for name, value in logs.items()
        }
    if isinstance(logs, (list, tuple)):
        mapped = [
            map_leaves(function, value, (*path, index))
            for index, value in enumerate(logs)
        ]
        return mapped if isinstance(logs, list) else tuple(mapped)
    return function(path, logs)


def names_of(logs: Any) -> list[str]:
    """Return the paths of the values in some logs, as words.

    >>> names_of({"loss": 1, "compile_metrics": {"mae": 2}})
    ['compile_metrics/mae', 'loss']
    """
    return sorted("/".join(map(str, path)) for path in leaves_of(logs))
