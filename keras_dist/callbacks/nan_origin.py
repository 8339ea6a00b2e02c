"""Find the layer and the rows from which numbers that are not finite come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Origin:
    """The origin of numbers that are not finite.

    Args:
        layer: The first layer, in the order of the forward pass, whose output is not
            finite. If all outputs are finite: of the layers whose gradients are not,
            the one nearest to the loss.
        is_output: Whether `layer` was found by its output.
        inputs: Names of the arrays of the batch that are not finite.
        indices: Indices in the batch of the rows that caused it; empty if unknown.
    """

    layer: str
    is_output: bool
    inputs: tuple[str, ...]
    indices: tuple[int, ...]


def origin_of(model: Any, batch: Any, paths: Sequence[str]) -> Origin:
    """Find where the gradients of a batch become not finite.

    The forward pass is run once more, as for a prediction.

    Args:
        model: The model, with the weights before the update.
        batch: The batch, as `train_step` received it.
        paths: Paths of the variables whose gradients are not finite, in the model's
            order.
    """
    inputs, indices = [], set()
    for name, array in named_arrays(batch).items():
        rows = _bad_rows(array)
        if rows is not None and rows.any():
            inputs.append(name)
            indices |= set(np.flatnonzero(rows).tolist())
    try:
        first = _first_output(model, keras.utils.unpack_x_y_sample_weight(batch)[0])
    except Exception:  # the batch of a custom train step may be of any kind
        first = None
    layer = paths[-1].split("/")[-2:][0] if paths else ""
    if first is not None:
        layer, rows = first
        if not indices and rows is not None:
            indices = set(np.flatnonzero(rows).tolist())
    return Origin(layer, first is not None, tuple(inputs), tuple(sorted(indices)))


def named_arrays(batch: Any) -> dict[str, np.ndarray]:
    """The arrays of a batch by name: `x`, `y`, `sample_weight`, or their elements.

    >>> sorted(named_arrays(({"a": np.ones(2), "b": [np.ones(2)]}, np.ones(2))))
    ['x.a', 'x.b.0', 'y']
    """
    found: dict[str, np.ndarray] = {}
    if isinstance(batch, (list, tuple)) and len(batch) <= 3:
        names = ("x", "y", "sample_weight")
        _add(found, "", dict(zip(names, batch, strict=False)))
    else:
        _add(found, "batch" if isinstance(batch, (dict, list, tuple)) else "x", batch)
    return found


def _add(found: dict[str, np.ndarray], name: str, value: Any) -> None:
    prefix = f"{name}." if name else ""
    if value is None:
        return
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        items = list(enumerate(tf.nest.flatten(value, expand_composites=True)))
    else:
        found[name] = np.asarray(value)
        return
    for key, part in items:
        _add(found, f"{prefix}{key}", part)


def _first_output(model: Any, x: Any) -> tuple[str, Any] | None:
    """The first layer whose output is not finite, and a mask of rows; or `None`."""
    found: list[tuple[str, Any]] = []
    keras_call = keras.layers.Layer.__call__

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = keras_call(layer, *args, **kwargs)
        for leaf in keras.tree.flatten(outputs) if not found else ():
            rows = _bad_rows(leaf)
            if rows is not None and rows.any():
                found.append((layer.name, rows if len(rows) == num_rows else None))
                break
        return outputs

    tensors = keras.tree.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), x
    )
    leaves = [leaf for leaf in keras.tree.flatten(tensors) if leaf is not None]
    num_rows = len(leaves[0])
    # Every layer is called through this method, also in a custom `call`.
    keras.layers.Layer.__call__ = call
    try:
        model(tensors)
    finally:
        keras.layers.Layer.__call__ = keras_call
    return found[0] if found else None


def _bad_rows(value: Any) -> Any:
    """Mask of the rows with a number that is not finite; `None` if not an array."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return None
    is_array = isinstance(value, (np.ndarray, tf.Tensor))
    if not is_array or tf.is_symbolic_tensor(value):
        return None
    tensor = tf.convert_to_tensor(value)
    if not tensor.dtype.is_floating or not tensor.shape.rank:
        return None
    is_bad = tf.logical_not(tf.math.is_finite(tensor))
    return tf.reduce_any(is_bad, axis=list(range(1, tensor.shape.rank))).numpy()
