"""Collectives: of any value outside of a graph, and of tensors in a graph, too.

Every rank calls the same ones in the same order. On one rank they return their input.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm import runtime, transport
from keras_dist.errors import RankError, describe, is_known, mark_known, summarize
from keras_dist.launch.signing import sign, verify
from keras_dist.lines import find_caller

# Variables of fewer bytes are broadcast together, in messages of about so many.
_PACKED, _MESSAGE = 2**16, 2**20

# Dtypes that Horovod broadcasts. Others are sent as their bits, in words of their size.
_BROADCAST = {tf.bool, tf.uint8, tf.int8, tf.int32, tf.int64}
_BROADCAST |= {tf.float16, tf.float32, tf.float64}
_WORDS = {1: tf.uint8, 2: tf.float16, 4: tf.float32, 8: tf.float64}

# What a collective raises that another rank has refused, or that it has no part in.
_REFUSED = tf.errors.FailedPreconditionError, tf.errors.CancelledError

# The length before each message of a gather, which is sent in words of int32.
_LENGTH_BYTES, _WORD = 8, 4

# The collectives in which the ranks tell their errors, and in threads that read data.
_FAILURE, _READER = "keras_dist.failure", "keras_dist.reader"

# Tensors of at least this many bytes get an allreduce of their own: packing copies all
# bytes twice, and a tensor alone can be sent as soon as it is computed.
_LARGE = 4 * 2**20

_TWO_BYTES = {"fp16": tf.float16, "bf16": tf.bfloat16}

# Before numbers are cast to float16, whose largest is 65,504, they are scaled so that
# the largest has this exponent.
_LARGEST_EXPONENT = 14

# For each graph, the numbers of the collectives of each kind that were traced in it.
_numbers: WeakKeyDictionary[Any, dict[str, dict[Hashable, int]]] = WeakKeyDictionary()

Value = TypeVar("Value")


def average(value: Any) -> Any:
    """Return the mean of `value` over all ranks.

    Args:
        value: A tensor, a variable, a NumPy array, a number, or a list, tuple or dict
            of these. Structure and shapes must be the same on every rank.

    Returns:
        The same structure. Integers become float64.

    Raises:
        TypeError: If `value` contains anything else.
        ValueError: If an array has more than 2**31 − 1 elements and NCCL is not used.
        RuntimeError: If another rank has ended, or if this is called inside a
            `first_rank` block or in a process that a rank started.

    Example:

    >>> average({"loss": 0.25})  # without a launcher: one rank
    {'loss': 0.25}
    """
    average_one = functools.partial(_sum_one, divisor=runtime.connection()[1].size)
    return keras.tree.map_structure(average_one, value)


def sum(value: Any) -> Any:
    """Return the sum of `value` over all ranks.

    Args:
        value: As in `average`.

    Returns:
        The same structure. Integers of NumPy, and tensors of integers with fewer than
        32 bits, are summed in int64, as by NumPy's own `sum`.

    Raises:
        TypeError: If `value` contains something that `average` does not accept.
        ValueError: If an array has more than 2**31 − 1 elements and NCCL is not used.
        RuntimeError: If another rank has ended, or if this is called inside a
            `first_rank` block or in a process that a rank started.

    Example:

    >>> sum([1, 2])
    [1, 2]
    """
    return keras.tree.map_structure(_sum_one, value)


def broadcast(value: Value | None, root_rank: int = 0) -> Value:
    """Return the value of `root_rank` on every rank.

    Args:
        value: A tensor or variable (of the same shape on all ranks), or any Python
            object that can be pickled. The values of the other ranks are ignored; they
            may be `None` unless the root's value is a tensor.
        root_rank: The rank whose value is sent to the others.

    Returns:
        The value that `root_rank` passed; a tensor for a variable.

    Raises:
        ValueError: If `root_rank` is not a rank.
        RuntimeError: If another rank has ended, has failed, or is in another call; or
            inside a `first_rank` block, or in a process that a rank started.
        Exception: The error of `pickle`, if it cannot pickle the value.

    Example:

    >>> broadcast("from the first rank")
    'from the first rank'
    """
    link, world = runtime.connection()
    if not 0 <= root_rank < world.size:
        raise ValueError(
            f"`root_rank` must be from 0 to {world.size - 1}. Received: {root_rank}"
        )
    own: Any = value  # `None` only where another rank has the value
    if link is None:
        return own
    if _is_tensor(value):
        own = tf.convert_to_tensor(value)
        dtype, name = own.dtype, name_of("broadcast")
        is_plain = dtype in _BROADCAST
        wire = own if is_plain else tf.bitcast(own, _WORDS[dtype.real_dtype.size])
        wire = _run("broadcast", link, _hide(wire), name, root_rank=root_rank)
        return wire if is_plain else tf.bitcast(wire, dtype)
    sent: Any = value if world.rank == root_rank else None
    return exchange(sent, f"{_name_call()} from rank {root_rank}")[root_rank]


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, as a list in rank order, on every rank.

    Args:
        value: A tensor or variable (shapes may differ between the ranks), or any
            Python object that can be pickled.

    Returns:
        A list with one value per rank; tensors for tensors and variables.

    Raises:
        RuntimeError: If another rank has ended, has failed, or is in another call; or
            inside a `first_rank` block, or in a process that a rank started.
        Exception: The error of `pickle`, if it cannot pickle `value`.

    Example:

    >>> gather("mine")
    ['mine']
    """
    link, _ = runtime.connection()
    if link is None:
        return [value]
    is_tensor = _is_tensor(value)
    found: list[Any] = exchange(to_array(value) if is_tensor else value, _name_call())
    return [tf.convert_to_tensor(array) for array in found] if is_tensor else found


def exchange(value: Value, call: str) -> list[Value]:
    """Gather an object of each rank, if all ranks are in the same call.

    Args:
        value: Any Python object that can be pickled.
        call: What the exchange is for. A user's `gather` must not meet the package's
            own, or one would return what the other has sent.

    Raises:
        RuntimeError: On all ranks, if some are in other calls; with the line of each.
    """
    if runtime.connection()[0] is None:
        return [value]
    with raise_on_all():  # what cannot be pickled
        message = sign((call, value))
    calls, values = zip(*_gather_signed(message, _allgather), strict=True)
    if len(set(calls)) > 1:
        name = call.rpartition(".")[2].partition(" ")[0]
        here = sign(f"in `{name}` at {find_caller()}")
        lines = enumerate(_gather_signed(here, _allgather))
        received = "; ".join(f"rank {rank} {line}" for rank, line in lines)
        error = RuntimeError(
            f"All ranks wait, in different collectives. Received: {received}. Call "
            "`gather`, `dist_fit` and all else that uses the other ranks on all of "
            "them, in the same order."
        )
        mark_known(error)
        raise error
    return list(values)


def _name_call() -> str:
    """Name the function of this file that was called, or its caller in the package."""
    caller = sys._getframe(2)
    module = caller.f_globals.get("__name__", "")
    is_ours = module.startswith("keras_dist.")
    found = caller if is_ours else sys._getframe(1)
    return f"{module if is_ours else ''}.{found.f_code.co_name}"


@contextlib.contextmanager
def raise_on_all() -> Iterator[None]:
    """Context manager whose error is raised on all ranks, wherever they wait.

    The block may have collectives. The others get a `RankError` in the collective that
    they wait in, or come to next.

    Raises:
        Exception: The error of this rank; `RankError` if another rank's is the cause.
    """
    link = runtime.connected_link()
    try:
        with (
            link.listen() if link else contextlib.nullcontext(),
            transport.explain_errors(),
        ):
            yield
    except (StopIteration, tf.errors.OutOfRangeError):
        raise  # the end of data
    except Exception as error:  # every other error has to be sent to the other ranks
        _raise_on_all(error)


def _raise_on_all(error: Exception) -> NoReturn:
    """Raise an error when all ranks know it: no rank waits for this one any more."""
    link, is_told = None, False
    with contextlib.suppress(RuntimeError):  # no rank, or the others are elsewhere
        link, is_told = runtime.connection()[0], True
    failed: list[tuple[int, str]] = []
    is_cause = link is None or not link.is_refused(error)
    if link is not None and not is_known(error):
        names = link.list_names() - {_FAILURE}
        message = sign((describe(error) if is_cause else None, names))
        try:
            with (
                tf.init_scope(),  # the block may be in a graph that is being traced
                transport.record_wait(f"failure: {summarize(error)}"),
                link.refuse(names),
            ):
                replies = _gather_signed(message, _gather_in_graph(_FAILURE))
                causes, others = zip(*replies, strict=True)
                told = enumerate(causes)
                failed = [(k, cause) for k, cause in told if cause is not None]
                if more := set().union(*others) - names:
                    with link.refuse(more):
                        pass
        except RuntimeError as ended:  # where others have ended, nobody has to know
            error = error if is_cause else ended
    if failed and not is_cause:
        error = RankError(*failed[0])
        error.__suppress_context__ = True
    if is_told:
        mark_known(error)
    raise error


def _run(function: str, link: Any, tensor: Any, name: str, **options: Any) -> Any:
    """Run a collective; outside of a graph, one that was refused is a `RankError`."""
    try:
        return transport.run(function, link, tensor, name, **options)
    except _REFUSED as error:
        _raise_on_all(error)


def to_array(value: Any) -> np.ndarray:
    """Copy a tensor, a variable or a number into an array.

    As `keras.ops.convert_to_numpy`, which fails for one number in bfloat16.
    """
    try:
        return keras.ops.convert_to_numpy(value)
    except ValueError:
        return np.array(keras.ops.convert_to_tensor(value).numpy())


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Assign the values of `root_rank` to the variables of every rank.

    Large ones are sent one after the other, and small ones in messages of 1 MiB: so the
    memory needed beside the model is that of some messages, or of the largest variable.

    Args:
        variables: Keras variables, of the same shapes and dtypes on every rank.
        root_rank: The rank whose values are sent to the others.
    """
    link, world = runtime.connection()
    if link is None:
        return
    small = [variable for variable in variables if _num_bytes(variable) < _PACKED]
    ends = itertools.accumulate(map(_num_bytes, small))
    messages: dict[int, list[Any]] = {}
    for variable, end in zip(small, ends, strict=True):
        messages.setdefault(end // _MESSAGE, []).append(variable)
    for message in messages.values():
        is_root = world.rank == root_rank
        sent = [to_array(variable) for variable in message] if is_root else None
        for variable, value in zip(message, broadcast(sent, root_rank), strict=True):
            variable.assign(value)
    for variable in variables:
        if _num_bytes(variable) >= _PACKED:
            variable.assign(broadcast(variable, root_rank))


def sum_tensors(tensors: Sequence[Any], *, name: str, dtype: Any) -> list[Any]:
    """Sum many tensors over all ranks, packed into one allreduce.

    Large tensors are not packed; each has an allreduce of its own.

    Args:
        tensors: Tensors of static or dynamic shape, of any float or integer dtype.
        name: Name of the collectives, fixed and the same on all ranks. Horovod matches
            the collectives of the ranks by name; ranks with different names wait for
            ever.
        dtype: The tensors are cast to this dtype, sent in it and summed in it.

    Returns:
        Tensors of dtype `dtype`, in the order and the shapes of `tensors`.
    """
    link, _ = runtime.connection()
    tensors = [tf.cast(tensor, dtype) for tensor in tensors]
    if link is None or not tensors:
        return tensors
    result: list[Any] = [None] * len(tensors)
    small: dict[int, Any] = {}
    for index, tensor in enumerate(tensors):
        count = tensor.shape.num_elements()
        if count is not None and count * tensor.dtype.size >= _LARGE:
            own_name = f"{name}.large.{index}"
            result[index] = _run("allreduce", link, tensor, own_name)
        else:
            small[index] = tensor
    if small:
        flat = tf.concat([tf.reshape(t, [-1]) for t in small.values()], axis=0)
        total = _run("allreduce", link, flat, name)
        sums = tf.split(total, [tf.size(tensor) for tensor in small.values()])
        for (index, tensor), own_sum in zip(small.items(), sums, strict=True):
            result[index] = tf.reshape(own_sum, tf.shape(tensor))
    return result


def sum_compressed(flat: Any, largest: Any, *, kind: str, name: str) -> Any:
    """Sum a vector over all ranks, in two collectives of half the bytes of float32.

    A reduce-scatter followed by an allgather: each rank sends chunk r of its vector to
    rank r (alltoall). Rank r adds the chunks in float32, in rank order, and sends the
    sum to all ranks (allgather). Each number is rounded twice, once per collective, and
    sums are never taken in two bytes.

    Args:
        flat: Vector of float32, of the same length on all ranks.
        largest: The largest finite absolute value in the vectors of all ranks.
        kind: `"fp16"` or `"bf16"`. With `"fp16"` numbers are scaled by a power of two
            so that the largest one fits; bfloat16 has the range of float32.
        name: Name of the collectives: fixed, and the same on all ranks.
    """
    link, world = runtime.connection()
    if link is None:
        return flat
    exponent = tf.math.floor(tf.math.log(tf.maximum(largest, 2.0**-126)) / math.log(2))
    shift = _LARGEST_EXPONENT - exponent if kind == "fp16" else tf.zeros_like(exponent)
    length = math.prod(flat.shape)
    chunk_length = -(-length // world.size)
    padded = tf.pad(flat, [[0, chunk_length * world.size - length]])
    words = _encode(tf.reshape(padded, [world.size, chunk_length]), shift, kind)
    received = _run("alltoall", link, words, f"{name}.pieces")
    chunks = tf.unstack(_decode(received, shift, kind), world.size)
    # The sum of the largest numbers of all ranks fits, too.
    shift -= math.ceil(math.log2(world.size))
    words = _encode(tf.add_n(chunks)[tf.newaxis], shift, kind)
    sums = _run("allgather", link, words, f"{name}.sums", equal_rows=True)
    return tf.reshape(_decode(sums, shift, kind), [-1])[:length]


def total(tensor: Any, *, purpose: str, divisor: int | None = None) -> Any:
    """Sum a tensor over all ranks.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        purpose: Part of the collective's name: what the collective is for.
        divisor: Of the sum, before its dtype is that of `tensor` again.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor
    result = _run("allreduce", link, sendable(tensor), name_of(purpose))
    return tf.cast(result if divisor is None else result / divisor, tensor.dtype)


def gather_rows(tensor: Any, *, name: str, **options: Any) -> Any:
    """Concatenate the tensors of all ranks along their first axis, in rank order.

    Args:
        tensor: A tensor of this rank.
        name: Name of the collective.
        **options: `equal_rows=True` if all ranks have as many rows: TensorFlow's
            transport then need not compare them before.
    """
    link, _ = runtime.connection()
    if link is None:
        return tensor
    # Indices of rows are nearly always int32, and half of what an `Embedding` may send.
    wire = _hide(tensor) if tensor.dtype == tf.int32 else sendable(tensor)
    result = _run("allgather", link, wire, name, **options)
    return tf.cast(result, tensor.dtype)


def gather_in_thread(value: Any) -> list[Any]:
    """Return the values of all ranks in rank order, in a thread that reads data.

    It runs in a graph, where Horovod knows a collective by its name. Outside of a graph
    it knows the kind alone: where Keras reads ahead, it would take one of the reading
    thread for one of an eager step.
    """
    with transport.record_wait(_READER):
        return _gather_signed(sign(value), _gather_in_graph(_READER))


@functools.cache
def _gather_in_graph(name: str) -> Any:
    made = tf.function(functools.partial(_allgather, name=name), autograph=False)
    # In a train step, calls of other functions are part of the step.
    return made.get_concrete_function(tf.TensorSpec([None], tf.int32))


def name_of(purpose: str, key: Hashable = None) -> str:
    """Name a collective, the same on every rank however often it has traced before.

    Several collectives of a graph may run at once, so they need different names: those
    of one kind are numbered in the order in which they are traced.

    Args:
        purpose: What the collective is for.
        key: What distinguishes it from others of this purpose in the same graph, if one
            rank may trace it twice there: a function inside of another one is traced
            again if it has made variables, which a rank with a loaded model does not.
    """
    if tf.executing_eagerly():
        return f"keras_dist.{purpose}"
    graph: Any = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph  # from a branch (`tf.cond`) to its function
    numbers = _numbers.setdefault(graph, {}).setdefault(purpose, {})
    key = len(numbers) if key is None else key
    return f"keras_dist.{purpose}.{numbers.setdefault(key, len(numbers) + 1)}"


def sendable(tensor: Any) -> Any:
    """Cast a tensor to a dtype that Horovod can sum, and hide that it is constant.

    Horovod sums no bfloat16, no bool, and no small or unsigned integers, and a sum of
    int32 may overflow before it is divided. A complex tensor is an error there.
    """
    dtype = tensor.dtype
    if dtype in (tf.bfloat16, tf.float16):
        dtype = tf.float32
    elif not (dtype.is_floating or dtype.is_complex):
        dtype = tf.int64
    return _hide(tf.cast(tensor, dtype))


def _hide(tensor: Any) -> Any:
    """Hide from TensorFlow that a tensor is constant.

    While it traces, it computes what depends on constants alone, a collective too, and
    not at the same time on all ranks.
    """
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def _sum_one(value: Any, divisor: int | None = None) -> Any:
    is_python = isinstance(value, (int, float))
    is_array = isinstance(value, (np.ndarray, np.generic))
    has_numbers = is_python or is_array or _is_tensor(value)
    if isinstance(value, np.ndarray):
        has_numbers = value.dtype.kind in "fiub"
    if not has_numbers:
        raise TypeError(
            "Only numbers, arrays and tensors, and lists, tuples and dicts of these, "
            f"can be summed or averaged over the ranks. Received: {value!r} of type "
            f"{type(value).__name__}. Use `gather` or `broadcast` for other objects."
        )
    if runtime.connection()[0] is None and divisor is None:
        return value
    kind = None if divisor is None else float
    tensor = tf.convert_to_tensor(np.asarray(value, kind) if is_python else value)
    if not tensor.dtype.is_floating and divisor is not None:
        tensor = tf.cast(tensor, tf.float64)
    elif not tensor.dtype.is_floating and tensor.dtype.size < (8 if is_array else 4):
        tensor = tf.cast(tensor, tf.int64)
    tensor = total(tensor, purpose="sum", divisor=divisor)
    if is_python:
        return tensor.numpy().item()
    return tensor.numpy() if is_array else tensor


def _gather_signed(message: bytes, run: Callable[[Any], Any]) -> list[Any]:
    """Gather what all ranks have signed, each with its length before it."""
    padding = bytes(-len(message) % _WORD)
    sized = len(message).to_bytes(_LENGTH_BYTES, "big") + message + padding
    everyone = run(tf.constant(np.frombuffer(sized, np.int32)))
    left = memoryview(everyone.numpy().tobytes())
    values = []
    while left:
        end = _LENGTH_BYTES + int.from_bytes(left[:_LENGTH_BYTES], "big")
        values.append(verify(bytes(left[_LENGTH_BYTES:end])))
        left = left[end + -end % _WORD :]
    return values


def _allgather(own: Any, name: str = "keras_dist.gather") -> Any:
    link, _ = runtime.connection()
    return own if link is None else _run("allgather", link, own, name)


def _num_bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.Variable) or tf.is_tensor(value)


def _encode(numbers: Any, shift: Any, kind: str) -> Any:
    """Scale float32 by a power of two, and cast it to words of two bytes each.

    Their dtype is float16 for both kinds: Horovod does not know bfloat16.
    """
    return tf.bitcast(
        tf.cast(numbers * _raise_two(shift), _TWO_BYTES[kind]), tf.float16
    )


def _decode(words: Any, shift: Any, kind: str) -> Any:
    return tf.cast(tf.bitcast(words, _TWO_BYTES[kind]), tf.float32) / _raise_two(shift)


def _raise_two(exponent: Any) -> Any:
    """2 to the power of integers from −126 to 127: exact, made of the bits."""
    clipped = tf.clip_by_value(exponent, -126.0, 127.0)
    return tf.bitcast((tf.cast(clipped, tf.int32) + 127) * 2**23, tf.float32)
