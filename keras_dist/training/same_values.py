"""Compare what must be equal on all ranks: arrays, and constants of layers."""

import contextlib
import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.data.arrays import is_arrays, is_scipy_sparse
from keras_dist.lines import warn

# Of each array so many rows are compared, spread over all of it, and of each row so
# many bytes, from its middle: no pass over a file that is larger than memory.
_ROWS, _ROW_BYTES = 256, 4096

# Up to this size, a constant of a layer is compared whole.
_WHOLE_BYTES = 2**20

# Results of the same computation may differ in their last digits from host to host.
_ROUNDING = 1e-4

_ADVICE = (
    "Seed what splits or shuffles them (`random_state=` of `train_test_split`, "
    "keras.utils.set_random_seed), sort what was a set, or pass "
    'shard="none" if each rank has its own rows.'
)


def agree_on_arrays(data: Mapping[str, Any]) -> None:
    """Raise an error on all ranks if arrays differ between the ranks. A collective.

    Only counts and shapes were compared otherwise: after an unseeded split, the ranks
    would train on rows that others validate. A few hundred rows of each array are
    compared; what is no array, or structure of arrays, is left out.
    """
    if comm.size() == 1:
        return
    samples = {
        name: [
            _sample(leaf)
            for leaf in tf.nest.flatten(arrays, expand_composites=True)
            if leaf is not None and len(leaf.shape) > 0
        ]
        for name, arrays in data.items()
        if is_arrays(arrays)
    }
    if differing := first_difference(samples):
        name, rank = differing
        raise ValueError(
            f"The ranks have different rows in `{name}`. Received: rows on rank {rank} "
            f"that differ from rank 0's, in arrays of the same shape. {_ADVICE}"
        )


def agree_on_constants(model: Any) -> None:
    """Compare what layers hold beside their weights. A collective.

    The words of a `StringLookup` and the mean of a `Normalization` come from data, the
    mask of a layer perhaps from a random generator: with others on each rank, the ranks
    would average the gradients of different functions.

    Raises:
        ValueError: On all ranks, if a layer of Keras differs. For a layer of the user's
            the first rank warns: it may hold what it has computed last.
    """
    layers = private.layers_of(model)
    constants = {str(n): _constants(layer) for n, layer in enumerate(layers)}
    differing = first_difference(constants)
    if differing is None:
        return
    layer = layers[int(differing[0])]
    text = (
        f"The layer {layer.name!r} ({type(layer).__name__}) differs between the ranks: "
        "they would train different functions. Received: constants or a vocabulary on "
        f"rank {differing[1]} that differ from rank 0's. Adapt it to the same rows "
        "on all ranks, seed what is drawn (keras.utils.set_random_seed), and sort sets."
    )
    if type(layer).__module__.startswith("keras."):
        raise ValueError(text)
    if comm.rank() == 0:
        warn(text)


def first_difference(
    values: Mapping[str, Sequence[np.ndarray]],
) -> tuple[str, int] | None:
    """Return the first name whose arrays differ, and a rank; `None` if all are equal.

    It is a collective of a digest for each name; only arrays whose digests differ are
    sent. Floating-point values that differ in their last digits are taken for equal.
    """
    local = {n: hashlib.sha256(pickle.dumps(v)).digest() for n, v in values.items()}
    digests = comm.gather(local)
    names = sorted(
        name
        for name in set().union(*digests)
        if len({each.get(name) for each in digests}) > 1
    )
    if not names:
        return None
    first, *others = comm.gather({name: values.get(name) for name in names})
    for name in names:
        for rank, other in enumerate(others, 1):
            if not _are_close(first[name], other[name]):
                return name, rank
    return None


def read_checksums(variables: Sequence[Any]) -> tuple[int, ...]:
    """Return the CRC-32 of each variable: equal if all bits are, also of a NaN."""
    # In the host's memory they are read without a copy.
    arrays = (np.asarray(tf.convert_to_tensor(v.value)) for v in variables)
    return tuple(zlib.crc32(a.reshape(-1).view(np.uint8).data) for a in arrays)


def _constants(layer: Any) -> list[np.ndarray]:
    """Arrays that a layer holds which are no weights, and its vocabulary."""
    found = []
    if hasattr(layer, "get_vocabulary"):
        with contextlib.suppress(Exception):  # it has none yet
            found.append(np.array(list(layer.get_vocabulary())))
    for name, value in sorted(vars(layer).items()):
        is_tensor = isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
        if isinstance(value, np.ndarray) or (is_tensor and value.dtype != tf.resource):
            array = np.asarray(value)
            array = array if array.nbytes <= _WHOLE_BYTES else _sample(array)
            with contextlib.suppress(Exception):  # objects that cannot be sent
                pickle.dumps(array)
                found.append(array)
        elif name == "bin_boundaries":
            found.append(np.asarray(value, dtype="float64"))
    return found


def _sample(leaf: Any) -> np.ndarray:
    """A few hundred rows spread over an array, and of long rows the middle."""
    is_sparse = is_scipy_sparse(leaf)
    if not (tf.is_tensor(leaf) or isinstance(leaf, np.ndarray) or is_sparse):
        leaf = np.asarray(leaf)
    count = leaf.shape[0]
    indices = np.unique(np.linspace(0, max(count - 1, 0), _ROWS).astype(int))
    if is_sparse:
        rows = list(leaf.tocsr()[indices[:count]].toarray())
    else:
        rows = [leaf[index] for index in indices[:count]]
    return np.array([_middle(np.asarray(row)) for row in rows])


def _middle(row: np.ndarray) -> np.ndarray:
    most = max(1, _ROW_BYTES // max(row.itemsize, 1))
    begin = max(0, (row.size - most) // 2)
    return row.reshape(-1)[begin : begin + most]


def _are_close(
    arrays: Sequence[np.ndarray] | None, others: Sequence[np.ndarray] | None
) -> bool:
    if arrays is None or others is None or len(arrays) != len(others):
        return False
    return all(map(_is_close, arrays, others))


def _is_close(array: np.ndarray, other: np.ndarray) -> bool:
    if array.shape != other.shape or array.dtype != other.dtype:
        return False
    if array.dtype.kind not in "fc" and array.dtype.name != "bfloat16":
        return bool(np.array_equal(array, other))
    one, two = array.astype("complex128"), other.astype("complex128")
    largest = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    return bool(
        np.allclose(one, two, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)
    )
