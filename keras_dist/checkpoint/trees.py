"""Python values as trees of JSON and arrays, and back; nothing is pickled."""

from typing import Any

import numpy as np

from keras_dist.checkpoint.files import packed

_PLAIN = (type(None), bool, int, float, str)


def encoded(value: Any) -> Any:
    """Encode a value as a tree that a checkpoint can hold; arrays are copied.

    Raises:
        TypeError: If `value` is not a number, text, `None`, an array, or a list, tuple
            or dict of these.

    >>> encoded((1, {"best": [0.5]}))
    {'tuple': [1, {'items': [['best', {'list': [0.5]}]]}]}
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic) and value.dtype.kind != "O":
        return {"scalar": np.array(value)}
    if type(value) is np.ndarray and value.dtype.kind != "O":
        return {"values": value.copy()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encoded(part) for part in value]}
    if type(value) is dict:
        return {"items": [[encoded(k), encoded(v)] for k, v in value.items()]}
    raise TypeError(
        "Only numbers, text, None, NumPy arrays, and lists, tuples and dicts of these, "
        f"can be saved in a checkpoint. Received: {value!r}"
    )


def decoded(tree: Any) -> Any:
    """Decode a tree of `encoded`.

    >>> decoded(encoded((1, {"best": [0.5]})))
    (1, {'best': [0.5]})
    """
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "items":
        return {decoded(key): decoded(part) for key, part in value}
    if kind == "scalar":
        return value[()]
    if kind == "values":
        return value
    items = [decoded(item) for item in value]
    return items if kind == "list" else tuple(items)


def digest_of(tree: Any) -> bytes:
    """A digest that is the same for equal trees."""
    return packed(tree)[1]
