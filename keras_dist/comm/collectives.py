"""Average, sum, broadcast and gather of any value, outside of a graph."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm import runtime, transport
from keras_dist.comm.signed import sign, verify
from keras_dist.comm.tensors import name_of

# Many arrays are broadcast in buffers of at most this many bytes, so that the buffer
# that they are copied to stays small compared with the model.
_MESSAGE_BYTES = 8 * 2**20

# A gather of Python objects begins with one allgather of this many bytes per rank: 8
# bytes for the length of the pickled object, and then the object itself if it fits.
# Most do; only longer ones need a second allgather.
_HEAD_BYTES = 1024


def average(value: Any) -> Any:
    """Mean of `value` over all ranks.

    Args:
        value: A tensor, a variable, a NumPy array, a number, or a list, tuple or
            dict of these, of the same structure and shapes on every rank.

    Returns:
        The same structure. Integers become float64.

    Raises:
        TypeError: If `value` holds anything else.

    >>> average({"loss": 0.25})  # without a launcher: one rank
    {'loss': 0.25}
    """
    return keras.tree.map_structure(_averaged, value)


def sum(value: Any) -> Any:
    """Sum of `value` over all ranks.

    Arguments and errors are those of `average`; integers stay integers.

    >>> sum([1, 2])
    [1, 2]
    """
    return keras.tree.map_structure(_summed, value)


def broadcast(value: Any, root_rank: int = 0) -> Any:
    """Return the value of `root_rank` on every rank.

    Args:
        value: A tensor or variable (of the same shape on all ranks), or any Python
            object that can be pickled. The values of the other ranks are ignored.
        root_rank: The rank whose value is sent to the others.

    Raises:
        ValueError: If `root_rank` is not a rank.

    >>> broadcast("from the first rank")
    'from the first rank'
    """
    link, world = runtime.connection()
    if not 0 <= root_rank < world.size:
        raise ValueError(
            f"`root_rank` must be from 0 to {world.size - 1}. Received: {root_rank}"
        )
    if link is None:
        return value
    if _is_tensor(value):
        tensor = _tensor(value)
        name = name_of("broadcast")
        return with_wire_dtype(
            tensor,
            lambda x: transport.broadcast(link, x, root_rank=root_rank, name=name),
        )
    message = sign(value if world.rank == root_rank else None)
    return verify(_gather_bytes(message)[root_rank])


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, as a list in rank order, on every rank.

    Args:
        value: A tensor or variable (shapes may differ between the ranks), or any
            Python object that can be pickled.

    >>> gather("mine")
    ['mine']
    """
    link, _ = runtime.connection()
    if link is None:
        return [value]
    if _is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
        return [tf.convert_to_tensor(array) for array in gather(value)]
    return [verify(message) for message in _gather_bytes(sign(value))]


def gather_unless_equal(value: Any) -> list[Any] | None:
    """Gather a value of Python; `None` if it is the same on all ranks.

    The messages are compared, so that no rank has an object of each other rank where
    all is well. Equal values may have different messages, and are then gathered.

    Args:
        value: A Python object that can be pickled.
    """
    messages = _gather_bytes(sign(value))
    if all(message == messages[0] for message in messages):
        return None
    return [verify(message) for message in messages]


def broadcast_arrays(arrays: Sequence[np.ndarray], root_rank: int) -> list[np.ndarray]:
    """Return the arrays of `root_rank` on every rank, packed into few broadcasts.

    Args:
        arrays: Arrays of the same shapes and dtypes on every rank.
        root_rank: The rank whose arrays are sent to the others.
    """
    link, _ = runtime.connection()
    if link is None:
        return list(arrays)
    result: list[np.ndarray] = []
    for start, stop in _buffers([array.nbytes for array in arrays]):
        batch = arrays[start:stop]
        packed = np.concatenate([array.reshape(-1).view(np.uint8) for array in batch])
        tensor = tf.convert_to_tensor(packed)
        buffer = transport.broadcast(
            link, tensor, root_rank=root_rank, name="keras_dist.broadcast_arrays"
        ).numpy()
        ends = np.cumsum([array.nbytes for array in batch])[:-1]
        for array, received in zip(batch, np.split(buffer, ends), strict=True):
            result.append(received.view(array.dtype).reshape(array.shape))
    return result


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Assign the values of `root_rank` to the variables of every rank.

    The variables are sent in buffers, one after the other. So the memory needed beside
    the model is at most that of one buffer, or of the largest variable.

    Args:
        variables: Keras variables, of the same shapes and dtypes on every rank.
        root_rank: The rank whose values are sent to the others.
    """
    link, _ = runtime.connection()
    if link is None:
        return
    name = "keras_dist.broadcast_variable"
    for start, stop in _buffers([_num_bytes(variable) for variable in variables]):
        batch = variables[start:stop]
        if len(batch) == 1 and batch[0].dtype in ("float32", "float64"):
            value = tf.convert_to_tensor(batch[0])
            batch[0].assign(
                transport.broadcast(link, value, root_rank=root_rank, name=name)
            )
            continue
        arrays = [keras.ops.convert_to_numpy(variable) for variable in batch]
        received = broadcast_arrays(arrays, root_rank)
        for variable, array in zip(batch, received, strict=True):
            variable.assign(array)


def _num_bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _averaged(value: Any) -> Any:
    _check_number(value)
    _, world = runtime.connection()
    return _summed(_floating(value)) / world.size


def _summed(value: Any) -> Any:
    _check_number(value)
    link, _ = runtime.connection()
    if link is None:
        return value
    if isinstance(value, (int, float)):
        array = np.asarray(value, np.int64 if isinstance(value, int) else np.float64)
        return _reduce(link, tf.constant(array)).numpy().item()
    tensor = _reduce(link, _tensor(value))
    return tensor.numpy() if isinstance(value, (np.ndarray, np.generic)) else tensor


def _reduce(link: Any, tensor: Any) -> Any:
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.int64)
    name = name_of("sum")
    return with_wire_dtype(
        tensor, lambda x: transport.allreduce_sum(link, x, name=name)
    )


def with_wire_dtype(tensor: Any, collective: Callable[[Any], Any]) -> Any:
    """Call a collective with a dtype that Horovod can send, and cast the result back.

    Horovod sends no bfloat16, no bool, and no small or unsigned integers.
    """
    dtype = tensor.dtype
    if dtype in (tf.bfloat16, tf.float16):
        dtype = tf.float32
    elif not dtype.is_floating:
        dtype = tf.int64
    return tf.cast(collective(tf.cast(tensor, dtype)), tensor.dtype)


def _gather_bytes(message: bytes) -> list[bytes]:
    """Gather messages: in one collective, and a second one if any of them is long."""
    link, world = runtime.connection()
    if link is None:
        return [message]
    head = np.zeros(_HEAD_BYTES, np.uint8)
    # Little-endian on every host.
    content = np.frombuffer(len(message).to_bytes(8, "little") + message, np.uint8)
    head[: len(content)] = content[:_HEAD_BYTES]
    heads = transport.allgather(
        link, tf.constant(head), name="keras_dist.gather"
    ).numpy()
    heads = heads.reshape(world.size, _HEAD_BYTES)
    lengths = [int.from_bytes(head[:8].tobytes(), "little") for head in heads]
    if max(lengths) <= _HEAD_BYTES - 8:
        return [
            head[8 : 8 + length].tobytes()
            for head, length in zip(heads, lengths, strict=True)
        ]
    data = transport.allgather(
        link,
        tf.constant(np.frombuffer(message, np.uint8)),
        name="keras_dist.gather_long",
    ).numpy()
    ends = np.cumsum(lengths)
    return [
        data[end - length : end].tobytes()
        for end, length in zip(ends, lengths, strict=True)
    ]


def _buffers(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Divide arrays of these sizes in bytes into consecutive buffers.

    Returns:
        Ranges [start, stop) of the arrays of each buffer. A buffer has at most
        `_MESSAGE_BYTES` bytes, unless it holds one larger array.

    >>> _buffers([10, 20, 8 * 2**20, 5])
    [(0, 2), (2, 3), (3, 4)]
    """
    ranges, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > _MESSAGE_BYTES:
            ranges.append((start, index))
            start, filled = index, 0
        filled += size
    return ranges + ([(start, len(sizes))] if len(sizes) > start else [])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.Variable) or tf.is_tensor(value)


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(
        value.value if isinstance(value, keras.Variable) else value
    )


def _floating(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value if value.dtype.kind == "f" else value.astype(np.float64)
    tensor = _tensor(value)
    return tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.float64)


def _check_number(value: Any) -> None:
    if _is_tensor(value) or isinstance(value, (int, float, np.generic)):
        return
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return
    raise TypeError(
        "Only numbers, arrays and tensors, and lists, tuples and dicts of these, can "
        f"be summed or averaged over the ranks. Received: {value!r} of type "
        f"{type(value).__name__}. Use `gather` or `broadcast` for other objects."
    )
