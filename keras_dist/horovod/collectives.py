"""Horovod's collectives, of numbers, lists, arrays, tensors and variables.

Each is the function of `horovod.tensorflow` of the same name. The names by which
Horovod matches the collectives of the ranks are numbers here, so ranks that call
different collectives get Horovod's error for that, and do not wait for each other. On
one process, where Horovod does not run, a collective returns its input.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.comm import signed
from keras_dist.comm.runtime import connection

# TensorFlow would translate our functions inside of a `tf.function` of the user's: it
# takes seconds, and changes nothing.
no_autograph = tf.autograph.experimental.do_not_convert

# Horovod's numbers of its reductions.
Average, Sum, Adasum, Min, Max, Product = range(6)


class NoneCompressor:
    """Numbers are sent as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress`."""
        return tensor


class FP16Compressor:
    """Floats are sent in two bytes each."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16 if it is of floats, and its dtype."""
        is_float = tensor.dtype.is_floating
        return (tf.cast(tensor, tf.float16) if is_float else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress`, but for the rounding."""
        return tf.cast(tensor, ctx)


class Compression:
    """How numbers are sent: `Compression.none` or `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor


Compressor: TypeAlias = type[NoneCompressor] | type[FP16Compressor]


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
    *,
    device_dense: str = "",
    device_sparse: str = "",
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine the values of all ranks, each of which counts the same.

    Args:
        value: A number, a list, an array, a tensor or a variable, of the same shape and
            dtype on all ranks; or `tf.IndexedSlices`.
        name: Not needed: taken for scripts that pass it. A truth value is `average`, as
            in `horovod.tensorflow`.
        average: `True` for `Average`, `False` for `Sum`; older than `op`.
        prescale_factor: Factor on the values.
        postscale_factor: Factor on the result.
        op: By default `Average`.
        compression: `Compression.fp16` sends floats in two bytes.
        device_dense, device_sparse, ignore_name_scope: Not needed.
        process_set: The ranks that take part; by default all.

    Returns:
        A tensor of the shape and dtype of `value`.

    Raises:
        ValueError: If `op` and `average` are given, or `op` is no reduction.
        tf.errors.OpError: On all ranks, if they called different collectives, or for
            values of other shapes or dtypes.

    Example:

    >>> allreduce([1.0, 2.0]).numpy().tolist()  # on one rank
    [1.0, 2.0]
    """
    if isinstance(name, bool):  # the second argument of `horovod.tensorflow`
        name, average = None, name
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options = {"op": reduction(op, average), "compression": compression, **factors}
    return mark_reduced(_run("allreduce", value, process_set, factors, **options))


@no_autograph
def allgather(
    value: Any,
    name: str | None = None,
    *,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Concatenate the values of all ranks along their first axis, in rank order.

    Args:
        value: As in `allreduce`, but the length of the first axis may differ.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part; by default all.

    Returns:
        A tensor of the dtype of `value`, with the rows of all ranks.

    Raises:
        tf.errors.OpError: As in `allreduce`.

    Example:

    >>> allgather([[1.0], [2.0]]).numpy().tolist()  # on one rank
    [[1.0], [2.0]]
    """
    return _run("allgather", value, process_set)


@no_autograph
def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    *,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Return the value of `root_rank` on every rank, as a tensor.

    Args:
        value: As in `allreduce`.
        root_rank: Number of a rank among all, also with a process set.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part; by default all.

    Raises:
        ValueError: If `root_rank` is not a rank that takes part.
        tf.errors.OpError: As in `allreduce`.

    Example:

    >>> broadcast([1.0, 2.0], root_rank=0).numpy().tolist()
    [1.0, 2.0]
    """
    _check_root(root_rank, process_set)
    return _run("broadcast", value, process_set, root_rank=root_rank)


@no_autograph
def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    *,
    device_dense: str = "",
    compression: Any = Compression.none,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine the values of all ranks, and return this rank's rows of the result.

    Args:
        value: As in `allreduce`, with at least one axis.
        name, device_dense, ignore_name_scope: Not needed.
        op: `Average` or `Sum`.
        compression, process_set, prescale_factor, postscale_factor: See `allreduce`.

    Returns:
        A tensor with consecutive rows; where they cannot be divided equally, the first
        ranks have one more.

    Raises:
        ValueError: If `op` is no reduction.
        tf.errors.OpError: As in `allreduce`.

    Example:

    >>> reducescatter([[1.0], [2.0]]).numpy().tolist()  # on one rank: all rows
    [[1.0], [2.0]]
    """
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options = {"op": reduction(op), "compression": compression, **factors}
    return _run("reducescatter", value, process_set, factors, **options)


@no_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Send rows of `tensor` to each rank, and return those that this one received.

    Args:
        tensor: The rows for the first rank, then those for the next one, …
        splits: How many rows each rank gets; by default each as many.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part; by default all.

    Returns:
        The rows, in rank order; with `splits` also how many came from each rank.
    """
    if splits is None:
        return _run("alltoall", tensor, process_set)
    if connection()[0] is None:
        return tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits)
    return _run("alltoall", tensor, process_set, splits=splits)


def _run(
    function: str,
    value: Any,
    process_set: Any,
    factors: dict[str, float] | None = None,
    **options: Any,
) -> Any:
    """Call a function of `horovod.tensorflow`, where there are several ranks.

    Args:
        function: Its name.
        value: Its input.
        process_set: Horovod's, or `None` for all ranks.
        factors: Factors on the result, which on one process are all it does.
        **options: Its other arguments.
    """
    tensor = tf.convert_to_tensor(_plain(value))
    link, _ = connection()
    if link is None:
        factor = math.prod((factors or {}).values())
        return (
            tensor
            if factor == 1
            else tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
        )
    if process_set is not None:
        options["process_set"] = process_set
    name = comm.name_of("horovod")
    with comm.waiting(name):
        found = getattr(link.horovod, function)(
            comm.sendable(tensor), name=name, ignore_name_scope=True, **options
        )
    if isinstance(found, tuple):
        return tf.cast(found[0], tensor.dtype), found[1]
    return tf.cast(found, tensor.dtype)


def join() -> int:
    """Wait until all ranks call this, and take part with zeros in their collectives.

    Returns:
        The last rank that called it.
    """
    link, world = connection()
    if link is None:
        return world.rank
    with comm.waiting("keras_dist.join"):
        return int(link.horovod.join())


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Return the object of `root_rank`, which can be pickled, on every rank.

    Args:
        obj: The object; those of the other ranks are ignored.
        root_rank: Number of a rank among all.
        session, name: Not needed.
        process_set: The ranks that take part; by default all.
    """
    message = signed.sign(obj) if comm.rank() == root_rank else b""
    length = broadcast(len(message), root_rank, process_set=process_set)
    content = np.frombuffer(message or bytes(int(length)), np.uint8)
    received = broadcast(content, root_rank, process_set=process_set)
    return signed.verify(received.numpy().tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Return the objects of all ranks, which can be pickled, in rank order.

    Args:
        obj: The object of this rank.
        session, name: Not needed.
        process_set: The ranks that take part; by default all.
    """
    message = np.frombuffer(signed.sign(obj), np.uint8)
    lengths = allgather([len(message)], process_set=process_set).numpy()
    content = allgather(message, process_set=process_set).numpy()
    messages = np.split(content, np.cumsum(lengths)[:-1])
    return [signed.verify(message.tobytes()) for message in messages]


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
        root_rank: Number of a rank among all.
        process_set: The ranks that take part; by default all.
        inplace: Not needed.

    Raises:
        ValueError: On all ranks, if the variables differ in number, shape or dtype. If
            `root_rank` is not a rank that takes part.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> broadcast_variables(model.weights, root_rank=0)
    """
    _check_root(root_rank, process_set)
    found = list(variables() if callable(variables) else variables)
    # Also inside of a `tf.function`: it is traced once, and variables are values then.
    with tf.init_scope():
        # What the first trace of a function creates has values in its second trace.
        found = [one for one in found if _plain(one).is_initialized()]
        if process_set is None:
            _check_same(found, root_rank)
            comm.broadcast_variables(found, root_rank)
            return
        for variable in found:
            variable.assign(broadcast(variable, root_rank, process_set=process_set))


def broadcast_global_variables(root_rank: int) -> None:
    """Raises an error, as in Horovod with TensorFlow 2: there are no such variables.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables needs a graph of TensorFlow 1. Received: "
        f"root_rank={root_rank}. Use hvd.broadcast_variables(model.variables, "
        f"root_rank={root_rank}), or the BroadcastGlobalVariablesCallback."
    )


def _check_root(root_rank: int, process_set: Any) -> None:
    members = getattr(process_set, "ranks", None) or range(comm.size())
    if root_rank not in members:
        raise ValueError(
            f"`root_rank` must be a rank of {list(members)}. "
            f"Received: root_rank={root_rank}"
        )


def _check_same(variables: Sequence[Any], root_rank: int) -> None:
    """Raise an error on all ranks if their variables differ in number, shape, dtype."""
    kinds = [f"{tuple(v.shape)} {tf.as_dtype(v.dtype).name}" for v in variables]
    facts: dict[str, Any] = {"`root_rank`": root_rank}
    facts["the number of variables"] = len(kinds)
    for index, kind in enumerate(kinds):
        facts[f"the shape of variable {index}"] = kind
    comm.agree(
        facts, advice="Create the same model and the same optimizer on every rank."
    )


def mark_reduced(tensor: Any) -> Any:
    """Note on a tensor that it is the same on all ranks, and return it."""
    with contextlib.suppress(AttributeError):
        tensor._keras_dist_is_reduced = True
    return tensor


def is_reduced(tensor: Any) -> bool:
    """Return True if `mark_reduced` was called on the tensor."""
    return getattr(tensor, "_keras_dist_is_reduced", False)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, keras.Variable) else value


@no_autograph
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return a list with the `allreduce` of each of several tensors, of any dtypes.

    Args:
        tensors: The tensors.
        average, compression, op, prescale_factor, postscale_factor, process_set: See
            `allreduce`.
        device_dense, device_sparse, ignore_name_scope, name: Not needed.
    """
    factors = (prescale_factor, postscale_factor)
    options: dict[str, Any] = {"op": op, "compression": compression}
    return [
        allreduce(one, None, average, *factors, process_set=process_set, **options)
        for one in tensors
    ]


@no_autograph
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> list[Any]:
    """Return a list with the `allgather` of each of several tensors.

    Args:
        tensors: The tensors.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part; by default all.
    """
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


@no_autograph
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return a list with the `reducescatter` of each of several tensors.

    Args:
        tensors: The tensors.
        device_dense: Not needed.
        compression, op, process_set, prescale_factor, postscale_factor: See
            `allreduce`.
    """
    options: dict[str, Any] = {
        "compression": compression,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    return [reducescatter(tensor, None, op, **options) for tensor in tensors]
