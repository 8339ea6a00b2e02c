"""Collectives of numbers, lists, arrays, tensors and variables."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.horovod.ops import Adasum, Average, Compression, chosen
from keras_dist.horovod.process_sets import (
    ProcessSet,
    among,
    global_process_set,
    root_of,
)
from keras_dist.optimizer.options import Averaging, check_usable

# TensorFlow would translate our functions inside of a `tf.function` of the user's: it
# takes seconds, and changes nothing.
no_autograph = tf.autograph.experimental.do_not_convert

_PURPOSE = "horovod"


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
    process_set: ProcessSet = global_process_set,
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
        op: By default `Average`; also Horovod's number of an operation.
        compression: `Compression.fp16` sends floats in two bytes.
        device_dense, device_sparse: Not needed.
        process_set: The ranks that take part.
        ignore_name_scope: Not needed.

    Returns:
        A tensor of the shape and dtype of `value`.

    Raises:
        ValueError: If `op` and `average` are given, or `op` is no operation. If it is
            `Adasum`, and the ranks do not communicate over MPI. On all ranks, if they
            called different functions, or for values of other shapes or dtypes.

    Example:

    >>> allreduce([1.0, 2.0]).numpy().tolist()  # on one rank
    [1.0, 2.0]
    """
    if isinstance(name, bool):  # the second argument of `horovod.tensorflow`
        name, average = None, name
    kind = chosen(op, average)
    if kind is Adasum:
        check_usable(Averaging("adasum"))
    wire, context = compression.compress(_tensor(value))
    with among(process_set):
        _meet(f"allreduce of {_kind_of(wire)} by {kind.name}")
        reduced = comm.reduce(
            wire,
            kind.name,
            name=comm.name_of(_PURPOSE),
            before=prescale_factor,
            after=postscale_factor,
        )
    return mark_reduced(compression.decompress(reduced, context))


@no_autograph
def allgather(
    value: Any,
    name: str | None = None,
    *,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the values of all ranks along their first axis, in rank order.

    Args:
        value: As in `allreduce`, but the length of the first axis may differ.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part.

    Returns:
        A tensor of the dtype of `value`, with the rows of all ranks.

    Raises:
        ValueError: On all ranks, if they called different functions, or for rows of
            other shapes or dtypes.

    Example:

    >>> allgather([[1.0], [2.0]]).numpy().tolist()  # on one rank
    [[1.0], [2.0]]
    """
    tensor = _tensor(value)
    with among(process_set):
        _meet(f"allgather of rows of {_kind_of(tensor[:1])}")
        return comm.gather_rows(tensor, name=comm.name_of(_PURPOSE))


@no_autograph
def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    *,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of `root_rank` on every rank, as a tensor.

    Args:
        value: As in `allreduce`.
        root_rank: Number of a rank among all, also with a process set.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part.

    Returns:
        A tensor.

    Raises:
        ValueError: If `root_rank` is not a rank that takes part. On all ranks, if they
            called different functions, or for values of other shapes or dtypes.

    Example:

    >>> broadcast([1.0, 2.0], root_rank=0).numpy().tolist()
    [1.0, 2.0]
    """
    root, tensor = root_of(process_set, root_rank), _tensor(value)
    with among(process_set):
        _meet(f"broadcast of {_kind_of(tensor)} from rank {root_rank}")
        return comm.copy(tensor, root, name=comm.name_of(_PURPOSE))


@no_autograph
def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    *,
    device_dense: str = "",
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine the values of all ranks, and return this rank's rows of the result.

    Args:
        value: As in `allreduce`, with at least one axis.
        name, device_dense, ignore_name_scope: Not needed.
        op: `Average` or `Sum`.
        compression: `Compression.fp16` sends floats in two bytes.
        process_set: The ranks that take part.
        prescale_factor, postscale_factor: Factors on the values and on the result.

    Returns:
        A tensor with consecutive rows; where they cannot be divided equally, the first
        ranks have one more.

    Raises:
        ValueError: If `op` is no operation. On all ranks, if they called different
            functions, or for values of other shapes or dtypes.

    Example:

    >>> reducescatter([[1.0], [2.0]]).numpy().tolist()  # on one rank: all rows
    [[1.0], [2.0]]
    """
    kind, (wire, context) = chosen(op).name, compression.compress(_tensor(value))
    with among(process_set):
        _meet(f"reducescatter of {_kind_of(wire)} by {kind}")
        rows = comm.scatter(wire, kind, name=comm.name_of(_PURPOSE))
    rows = compression.decompress(rows, context)
    factor = prescale_factor * postscale_factor
    return rows if factor == 1.0 else rows * tf.cast(factor, rows.dtype)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of `root_rank`, which can be pickled, on every rank.

    Args:
        obj: The object; those of the other ranks are ignored.
        root_rank: Number of a rank among all.
        session, name: Not needed.
        process_set: The ranks that take part.
    """
    root = root_of(process_set, root_rank)
    with among(process_set):
        _meet(f"broadcast_object from rank {root_rank}")
        return comm.broadcast([obj], root)[0]  # a list: tensors are objects here


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, which can be pickled, in rank order.

    Args:
        obj: The object of this rank.
        session, name: Not needed.
        process_set: The ranks that take part.
    """
    with among(process_set):
        _meet("allgather_object")
        return [objects[0] for objects in comm.gather([obj])]


@no_autograph
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Assign the values of `root_rank` to the variables of every rank.

    Args:
        variables: Variables of Keras or TensorFlow.
        root_rank: Number of a rank among all.
        process_set: The ranks that take part.
        inplace: Not needed.

    Raises:
        ValueError: On all ranks, if the variables differ in number, shape or dtype. If
            `root_rank` is not a rank that takes part.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> broadcast_variables(model.weights, root_rank=0)
    """
    found = list(variables() if callable(variables) else variables)
    root = root_of(process_set, root_rank)
    # Also inside of a `tf.function`: it is traced once, and variables are values then.
    with among(process_set), tf.init_scope():
        _meet(f"broadcast_variables from rank {root_rank}")
        # What the first trace of a function creates has values in its second trace.
        found = [one for one in found if _plain(one).is_initialized()]
        check_same(found)
        comm.broadcast_variables(found, root)


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


def check_same(variables: Sequence[Any]) -> None:
    """Raise an error on all ranks if their variables differ in number, shape, dtype."""
    kinds = [f"{tuple(v.shape)} {tf.as_dtype(v.dtype).name}" for v in variables]
    facts: dict[str, Any] = {"the number of variables": len(kinds)}
    for index, kind in enumerate(kinds):
        facts[f"the shape of variable {index}"] = kind
    comm.agree(
        facts, advice="Create the same model and the same optimizer on every rank."
    )


def _meet(collective: str) -> None:
    """Raise an error on all ranks if they have called different collectives.

    In a graph all ranks have traced the same, and nothing is compared.
    """
    if tf.executing_eagerly():
        advice = "Call the same functions on all ranks, in the same order."
        comm.agree({"the collective": collective}, advice=advice)


def _kind_of(tensor: Any) -> str:
    return f"{tensor.dtype.name} {tuple(tensor.shape)}"


def mark_reduced(tensor: Any) -> Any:
    """Note on a tensor that it is the same on all ranks, and return it."""
    with contextlib.suppress(AttributeError):
        tensor._keras_dist_is_reduced = True
    return tensor


def is_reduced(tensor: Any) -> bool:
    """Tell whether `mark_reduced` was called on the tensor."""
    return getattr(tensor, "_keras_dist_is_reduced", False)


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(_plain(value))


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
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of each of several tensors, of any dtypes; a list.

    Args:
        tensors: The tensors.
        average, compression, op, prescale_factor, postscale_factor: See `allreduce`.
        device_dense, device_sparse, ignore_name_scope, name: Not needed.
        process_set: The ranks that take part.
    """
    return [
        allreduce(
            tensor,
            None,
            average,
            prescale_factor,
            postscale_factor,
            op,
            compression,
            process_set=process_set,
        )
        for tensor in tensors
    ]


@no_autograph
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of each of several tensors; a list.

    Args:
        tensors: The tensors.
        name, ignore_name_scope: Not needed.
        process_set: The ranks that take part.
    """
    return [allgather(tensor, process_set=process_set) for tensor in tensors]


@no_autograph
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of each of several tensors; a list.

    Args:
        tensors: The tensors.
        device_dense: Not needed.
        compression, op, prescale_factor, postscale_factor: See `reducescatter`.
        process_set: The ranks that take part.
    """
    options: dict[str, Any] = {
        "compression": compression,
        "process_set": process_set,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    return [reducescatter(tensor, None, op, **options) for tensor in tensors]
