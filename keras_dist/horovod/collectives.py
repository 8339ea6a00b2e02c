"""Horovod's collectives, of numbers, lists, arrays, tensors and variables.

Each is the function of `horovod.tensorflow` of the same name, with its arguments. Ranks
that call different ones, outside of a graph, get an error: Horovod itself would wait
forever. On one process, where Horovod does not run, a collective returns its input.
"""

import contextlib
import enum
import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.comm import transport
from keras_dist.comm.runtime import connection
from keras_dist.launch import signing

# TensorFlow would translate our functions inside of a `tf.function` of the user's: it
# takes seconds, and changes nothing.
no_autograph = tf.autograph.experimental.do_not_convert

# Horovod's numbers of its reductions.
Average, Sum, Adasum, Min, Max, Product = range(6)


class Compression(enum.Enum):
    """How numbers are sent: as they are, or floats in two bytes each."""

    none = "none"
    fp16 = "fp16"


def reduction(op: int | None, average: bool | None = None) -> int:
    """Return the reduction that two arguments of Horovod's functions ask for.

    Args:
        op: A reduction, by default `Average`.
        average: Older than `op`: `True` for `Average`, `False` for `Sum`.

    Raises:
        ValueError: If both are given, or `op` is no reduction, or `Adasum`.

    >>> reduction(None), reduction(None, False), reduction(Max)
    (0, 1, 4)
    """
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise ValueError(
            "`op` replaces `average`: only one of them can be given. "
            f"Received: op={op!r} and average={average!r}. Leave out `average`."
        )
    # True is 1, and would be Sum.
    if isinstance(op, bool) or op not in range(6):
        raise ValueError(
            "`op` must be one of hvd.Average, Sum, Min, Max and Product, or its "
            f"number. Received: op={op!r}"
        )
    if op == Adasum:
        raise ValueError(
            "hvd.Adasum weighs the gradients of the ranks by the angles between them, "
            "so that N ranks train another model than one process. Received: "
            "op=hvd.Adasum. Pass op=hvd.Average or op=hvd.Sum."
        )
    return op


@no_autograph
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """Combine the values of all ranks with equal weights.

    Args:
        value: A number, a list, an array, a tensor or a variable, of the same shape and
            dtype on all ranks; or `tf.IndexedSlices`.
        name: Ignored. A boolean means `average`, as in `horovod.tensorflow`.
        average: The older form of `op`: `True` for `Average`, `False` for `Sum`.
        prescale_factor, postscale_factor: Factors on the values and on the result.
        op: A reduction. The default is `Average`.
        compression: `Compression.fp16` sends floats in two bytes.
        **options: Other arguments of `horovod.tensorflow.allreduce`, such as
            `process_set`.

    Returns:
        A tensor of the shape and dtype of `value`.

    Raises:
        ValueError: If both `op` and `average` are given, or `op` is not a reduction;
            or, on all ranks, if they called different functions, or passed values of
            different shapes or dtypes.

    Example:

    >>> allreduce([1.0, 2.0]).numpy().tolist()  # on one rank
    [1.0, 2.0]
    """
    if isinstance(name, bool):  # the second argument of `horovod.tensorflow`
        average = name
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options |= {"op": reduction(op, average), "compression": compression, **factors}
    return mark_reduced(_run("allreduce", value, options))


@no_autograph
def allgather(value: Any, name: str | None = None, **options: Any) -> Any:
    """Concatenate the values of all ranks along their first axis, in rank order.

    Args:
        value: As in `allreduce`, but the length of the first axis may differ.
        name: Ignored.
        **options: Other arguments of `horovod.tensorflow.allgather`.

    Returns:
        A tensor with the rows of all ranks.

    Example:

    >>> allgather([[1.0], [2.0]]).numpy().tolist()  # on one rank
    [[1.0], [2.0]]
    """
    return _run("allgather", value, options)


@no_autograph
def broadcast(
    value: Any, root_rank: int, name: str | None = None, **options: Any
) -> Any:
    """Send the value of `root_rank` to every rank.

    Args:
        value: As in `allreduce`.
        root_rank: A rank, numbered among all ranks even with a process set.
        name: Ignored.
        **options: Other arguments of `horovod.tensorflow.broadcast`.

    Returns:
        A tensor with the value of `root_rank`.

    Raises:
        ValueError: If `root_rank` is not a rank that takes part.

    Example:

    >>> broadcast([1.0, 2.0], root_rank=0).numpy().tolist()
    [1.0, 2.0]
    """
    _check_root(root_rank, options.get("process_set"))
    return _run("broadcast", value, {**options, "root_rank": root_rank})


@no_autograph
def reducescatter(
    value: Any, name: str | None = None, op: int = Average, **options: Any
) -> Any:
    """Combine the values of all ranks, and return this rank's rows of the result.

    Args:
        value: As in `allreduce`, with at least one axis.
        name: Ignored.
        op: `Average` or `Sum`.
        **options: Other arguments of `horovod.tensorflow.reducescatter`.

    Returns:
        A tensor with consecutive rows. If the rows do not divide evenly, the first
        ranks have one more.

    Example:

    >>> reducescatter([[1.0], [2.0]]).numpy().tolist()  # on one rank: all rows
    [[1.0], [2.0]]
    """
    return _run("reducescatter", value, {**options, "op": reduction(op)})


def grouped_allreduce(tensors: Iterable[Any], **options: Any) -> list[Any]:
    """Return a list with the `allreduce` of each of several tensors, of any dtypes."""
    return [allreduce(tensor, **options) for tensor in tensors]


def grouped_allgather(tensors: Iterable[Any], **options: Any) -> list[Any]:
    """Return a list with the `allgather` of each of several tensors."""
    return [allgather(tensor, **options) for tensor in tensors]


def grouped_reducescatter(tensors: Iterable[Any], **options: Any) -> list[Any]:
    """Return a list with the `reducescatter` of each of several tensors."""
    return [reducescatter(tensor, **options) for tensor in tensors]


def _run(function: str, value: Any, options: dict[str, Any]) -> Any:
    """Call a function of `horovod.tensorflow`, where there are several ranks."""
    tensor = tf.convert_to_tensor(value)
    link, _ = connection()
    if link is None:
        names = ("prescale_factor", "postscale_factor")
        factor = math.prod(options.get(name, 1.0) for name in names)
        scaled = tensor if factor == 1.0 else tf.cast(tensor, tf.float64) * factor
        return tf.cast(scaled, tensor.dtype)
    options = {k: option for k, option in options.items() if option is not None}
    if tf.executing_eagerly() and "process_set" not in options:
        shape = tensor.shape[function == "allgather" :]
        called = f"{function} of {tensor.dtype.name} {tuple(shape)}"
        advice = "Call the same functions on all ranks, in the same order."
        comm.agree({"the collective": called}, advice=advice)
    if isinstance(compression := options.get("compression"), Compression):
        options = {**options, "compression": compression.name}
    wire, name = comm.sendable(tensor), comm.name_of("horovod")
    return tf.cast(transport.run(function, link, wire, name, **options), tensor.dtype)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Return the object of `root_rank`, which can be pickled, on every rank.

    Args:
        obj: The object; the objects of other ranks are ignored.
        root_rank: Number of a rank among all.
        session, name: Not used.
        process_set: The ranks that take part; by default all.
    """
    message = signing.sign(obj) if comm.rank() == root_rank else b""
    length = broadcast(len(message), root_rank, process_set=process_set)
    content = np.frombuffer(message or bytes(int(length)), np.uint8)
    content = broadcast(content, root_rank, process_set=process_set)
    return signing.verify(content.numpy().tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Return the objects of all ranks, which can be pickled, in rank order.

    Args:
        obj: The object of this rank.
        session, name: Not used.
        process_set: The ranks that take part; by default all.
    """
    message = np.frombuffer(signing.sign(obj), np.uint8)
    lengths = allgather([len(message)], process_set=process_set).numpy()
    content = allgather(message, process_set=process_set).numpy()
    messages = np.split(content, np.cumsum(lengths)[:-1])
    return [signing.verify(message.tobytes()) for message in messages]


@no_autograph
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = None,
    inplace: bool = False,
) -> None:
    """Assign the values of `root_rank` to the variables of every rank.

    Args:
        variables: Variables of Keras or TensorFlow.
        root_rank: A rank, numbered among all ranks.
        process_set: The ranks that take part. The default is all ranks.
        inplace: Ignored.

    Raises:
        ValueError: If `root_rank` is not a rank that takes part; or, on all ranks, if
            the variables differ in number, shape or dtype.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> broadcast_variables(model.weights, root_rank=0)
    """
    _check_root(root_rank, process_set)
    # Also inside of a `tf.function`: it is traced once, and variables are values then.
    with tf.init_scope():
        # What the first trace of a function creates has values in its second trace.
        found = [
            one
            for one in variables
            if (one.value if isinstance(one, keras.Variable) else one).is_initialized()
        ]
        if process_set is None:
            comm.agree_on_variables(found, {"`root_rank`": root_rank})
            comm.broadcast_variables(found, root_rank)
            return
        for variable in found:
            variable.assign(broadcast(variable, root_rank, process_set=process_set))


def _check_root(root_rank: int, process_set: Any) -> None:
    members = getattr(process_set, "ranks", None) or range(comm.size())
    if root_rank not in members:
        raise ValueError(
            f"`root_rank` must be a rank of {list(members)}. "
            f"Received: root_rank={root_rank}"
        )


def mark_reduced(tensor: Any) -> Any:
    """Note on a tensor that it is the same on all ranks, and return it."""
    with contextlib.suppress(AttributeError):
        tensor._keras_dist_is_reduced = True
    return tensor


def is_reduced(tensor: Any) -> bool:
    """Return True if a tensor is the same on all ranks, by `mark_reduced`."""
    return getattr(tensor, "_keras_dist_is_reduced", False)
