"""From a rank's own gradients to those that Keras applies: one exchange a dtype."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.errors import check_choice, mark_known
from keras_dist.optimizer import sparse, step_context
from keras_dist.optimizer.accumulation import accumulates
from keras_dist.optimizer.nested import nested_optimizers, variables_of
from keras_dist.optimizer.sparse import Lookups, map_values, with_shape
from keras_dist.optimizer.step_context import Request

# Horovod matches collectives by name, and Keras's names repeat. An optimizer gets its
# number where all ranks compare its gradients, so that they count alike.
_numbers = count()

# Around the ranks in an error of TensorFlow.
_MARK = "keras_dist: no update of rank "

# A float32 holds the integers of a step and a request.
_MOST_STEPS = 2**20

Op = Literal["average", "sum"]
Compression = Literal["fp16", "bf16"]


@dataclass(frozen=True)
class Averaging:
    """Options of the averaging, checked.

    Args:
        op: `"average"`, weighted by the rows of each rank, or `"sum"`.
        compression: How numbers are sent: `None` uncompressed, `"fp16"` or `"bf16"`.

    Raises:
        ValueError: If an option is unknown.
    """

    op: Op = "average"
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_choice("op", self.op, get_args(Op))
        check_choice("compression", self.compression, (None, *get_args(Compression)))


@dataclass
class AveragingState:
    """The state of an optimizer that averages, for one train function.

    Args:
        options: The options of the averaging.
        number: Part of the names of its collectives; `None` before the ranks have
            compared their gradients' shapes and dtypes.
        is_merged: Whether repeated rows are added up before they are sent, as all ranks
            have found then: a callback may change clipping before one traces again.
        lookups: Which tables are read once for all rows of a batch.
    """

    options: Averaging
    number: int | None = None
    is_merged: bool = False
    lookups: Lookups = field(default_factory=Lookups)


def reduce_gradients(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any] | None,
    *,
    is_sum: bool = False,
) -> list[Any]:
    """Take this rank's gradients, and return those that Keras applies.

    By default each is the mean over all ranks, weighted by the rows of each rank if
    they are known: the sum of gradient × rows, divided by the sum of rows. That is the
    gradient of the global batch, also if the ranks' last batches differ in length.

    Args:
        optimizer: An optimizer that averages.
        gradients: Tensors, `tf.IndexedSlices` or `None`.
        variables: The variables of the gradients; `None`: all that the optimizer was
            built for.
        is_sum: Whether they are sums over rows, so that the ranks' are added up.
    """
    state: AveragingState = optimizer._averaging
    known = variables_of(optimizer, variables)
    if comm.size() == 1:
        return list(gradients)
    if state.number is None:
        number, state.is_merged = next(_numbers), sparse.is_merged(optimizer)
        _check_same_gradients(optimizer, gradients, known, number)
        state.number = number
    if accumulates(optimizer) and not optimizer.built:
        with tf.init_scope():
            optimizer.build(known)
    present = [
        (with_shape(gradient, variable), variable)
        for gradient, variable in zip(gradients, known, strict=True)
        if gradient is not None
    ]
    average = _accumulate if accumulates(optimizer) else _average
    averaged = iter(average(optimizer, present, is_sum=is_sum))
    return [None if gradient is None else next(averaged) for gradient in gradients]


def mark_recorded(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
) -> list[Any]:
    """Mark gradients in a graph, for a `reduce_gradients` outside of it.

    Outside of a compiled function nothing shows any more how a table was read.
    """
    state: AveragingState = optimizer._averaging
    known = variables_of(optimizer, variables)
    if comm.size() == 1 or accumulates(optimizer):
        return list(gradients)
    return [state.lookups.mark(*pair) for pair in zip(gradients, known, strict=True)]


def weight_loss(optimizer: Any, loss: Any) -> Any:
    """Multiply the loss by this rank's fraction of the rows, if it is known.

    Then the gradients only have to be summed. To multiply each gradient, and to divide
    the sums, would read and write all of their bytes twice more.

    Args:
        optimizer: The optimizer that differentiates the loss.
        loss: The loss that Keras gives to `scale_loss`.
    """
    state: AveragingState = optimizer._averaging
    context = step_context.current()
    variables = private.trainable_variables_of(optimizer)
    is_double = any(str(v.dtype).endswith("float64") for v in variables)
    if not (
        comm.size() > 1
        and state.options == Averaging()
        and not accumulates(optimizer)
        # A fraction in the loss's dtype has to be precise enough.
        and loss.dtype in (tf.float64, tf.float64 if is_double else tf.float32)
        and context.rows_of_all is not None
        and context.is_keras_path
        and not context.is_sum_next("apply")
    ):
        return loss
    context.weighted.append(state)
    return loss * context.row_fraction(loss.dtype)


def _average(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, is_sum: bool
) -> list[Any]:
    """Reduce gradients over all ranks.

    Args:
        optimizer: An optimizer that averages.
        pairs: This rank's gradients, and their variables.
        is_sum: Whether they are sums over rows.
    """
    state: AveragingState = optimizer._averaging
    context, lookups = step_context.current(), state.lookups
    weight = 1 if context.rows is None else context.rows
    if is_sum or any(state is weighted for weighted in context.weighted):
        weight = None
    local = [gradient for gradient, _ in pairs]
    if is_sum and context.has_rows is not None:
        local = [map_values(context.count_own, gradient) for gradient in local]
    variables = [variable for _, variable in pairs]
    name = f"keras_dist.gradients.{state.number}"
    prepare = lookups.unmark if state.is_merged else lookups.prepare
    local = [
        _keep_counted(prepare(*pair)) for pair in zip(local, variables, strict=True)
    ]
    result = exchange(
        local, weight, state.options, is_merged=state.is_merged, name=name
    )
    if not state.is_merged:
        result = [
            lookups.add_up(
                reduced, _num_slices(own), variable, rows=context.rows, name=name
            )
            for reduced, own, variable in zip(result, local, variables, strict=True)
        ]
    result = [
        tf.cast(reduced, gradient.dtype)
        for reduced, (gradient, _) in zip(result, pairs, strict=True)
    ]
    scaled = keras.optimizers.LossScaleOptimizer
    if not any(isinstance(part, scaled) for part in nested_optimizers(optimizer)):
        return result
    return [
        map_values(sparse.all_or_none_finite, reduced)
        if isinstance(reduced, tf.IndexedSlices)
        else reduced
        for reduced in result
    ]


def _keep_counted(gradient: Any) -> Any:
    """Drop all slices if this rank's batch is a copy of another rank's.

    A slice of zeros is not nothing: some optimizers decay the row that it is of.
    """
    has_rows = step_context.current().has_rows
    if has_rows is None or not isinstance(gradient, tf.IndexedSlices):
        return gradient
    count = _num_slices(gradient) * tf.cast(has_rows, tf.int32)
    values, indices = gradient.values[:count], gradient.indices[:count]
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _num_slices(gradient: Any) -> Any:
    is_slices = isinstance(gradient, tf.IndexedSlices)
    return tf.shape(gradient.indices)[0] if is_slices else None


def _accumulate(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], *, is_sum: bool
) -> list[Any]:
    """Add up this rank's own part; the ranks exchange when an update is due.

    Args:
        optimizer: An optimizer that accumulates.
        pairs: This rank's gradients, and their variables.
        is_sum: Whether they are sums over rows.
    """
    state: AveragingState = optimizer._averaging
    options, context = state.options, step_context.current()
    factor: Any = 1.0
    if options.op == "average":
        factor = context.row_fraction(tf.float64)
        if is_sum:
            factor = context.count_own(tf.ones((), tf.float64))
        options = replace(options, op="sum")
    local: list[Any] = [
        tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)
        for gradient, _ in pairs
    ]
    variables = [variable for _, variable in pairs]
    accumulators = private.accumulators(optimizer, variables)

    def update() -> list[Any]:
        # Keras has divided what it has accumulated, and divides the result again.
        scale = optimizer.loss_scale_factor or 1
        added_up = [
            accumulator.value * scale + tf.cast(gradient, accumulator.dtype)
            for accumulator, gradient in zip(accumulators, local, strict=True)
        ]
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator.value))
        name = f"keras_dist.accumulated.{state.number}"
        sums = exchange(added_up, 1, options, name=name)
        return [tf.cast(s, g.dtype) for s, g in zip(sums, local, strict=True)]

    if not local:
        return []
    batch = tf.convert_to_tensor(private.batches_of(optimizer).value) + 1
    is_update = batch % optimizer.gradient_accumulation_steps == 0
    return tf.cond(is_update, update, lambda: list(local))


def exchange(
    gradients: Sequence[Any],
    weight: Any,
    options: Averaging,
    *,
    is_merged: bool = False,
    name: str,
) -> list[Any]:
    """Reduce gradients over all ranks; dense ones in few collectives per dtype.

    Args:
        gradients: Tensors or `tf.IndexedSlices`, of the same kinds and shapes on all
            ranks.
        weight: The weight of this rank's gradients in an average: the rows that they
            are a mean over. `None`: they have been multiplied by their weights.
        options: The options of the averaging.
        is_merged: Whether repeated rows of `tf.IndexedSlices` are added up before they
            are sent.
        name: A fixed name, the same on all ranks: Horovod matches collectives by name.

    Returns:
        For each gradient the weighted mean over all ranks, or the sum, as float32, or
        float64 if the gradient is that.
        An unmerged `tf.IndexedSlices` gives the slices of all ranks, everything else
        tensors.
    """
    is_mean = weight is not None and options.op == "average"
    # Horovod does not support bfloat16, and float16 is too narrow for a sum.
    wires = [g.dtype if g.dtype == tf.float64 else tf.float32 for g in gradients]
    result: dict[int, Any] = {}
    for wire in sorted(set(wires), key=str):
        factor = tf.cast(weight if is_mean else 1, wire)
        wire_name = f"{name}.{wire.name}"
        slices: dict[int, Any] = {}
        dense: dict[int, Any] = {}
        for index, gradient in enumerate(gradients):
            if wires[index] == wire:
                is_slices = isinstance(gradient, tf.IndexedSlices)
                (slices if is_slices else dense)[index] = tf.cast(gradient, wire)
        if is_merged:
            slices = {index: sparse.merge(own) for index, own in slices.items()}
        counts = [
            _by_rank(tf.cast(_num_slices(own), wire))
            for own in (slices.values() if is_merged else ())
        ]
        sums, total, counts = _sum_dense(
            list(dense.values()),
            factor,
            counts,
            is_mean=is_mean,
            compression=options.compression,
            name=wire_name,
        )
        result |= zip(dense, sums, strict=True)
        for number, (index, own) in enumerate(slices.items()):
            own_name = f"{wire_name}.{number}"
            if is_mean:
                own = map_values(functools.partial(tf.multiply, factor), own)
            summed = (
                sparse.sum_slices(own, counts[number], name=own_name)
                if is_merged
                else sparse.gather_slices(own, name=own_name)
            )
            if is_mean:
                summed = map_values(functools.partial(tf.divide, y=total), summed)
            result[index] = summed
    return [result[index] for index in range(len(gradients))]


def _by_rank(number: Any) -> Any:
    """Return zeros, with a number at this rank: their sum holds that of each rank."""
    return number * tf.one_hot(comm.rank(), comm.size(), dtype=number.dtype)


def _sum_dense(
    dense: list[Any],
    weight: Any,
    counts: list[Any],
    *,
    is_mean: bool,
    compression: Compression | None,
    name: str,
) -> tuple[list[Any], Any, list[Any]]:
    """Compute means or sums of dense gradients, and sums of weights and counts.

    The number of each rank's step, and its request, are sent with them as one number.
    """
    wire = weight.dtype
    requests, step = step_context.current().requests, step_context.current().step
    sent = tf.zeros([], wire)
    if requests is not None:
        request = tf.cast(requests.own.read_value(), tf.int64)
        sent = tf.cast(step % _MOST_STEPS * len(Request) + request, wire)
    values = [tensor * weight for tensor in dense] if is_mean else dense
    numbers = [weight, _by_rank(sent), *counts]
    if compression and wire == tf.float32 and dense:
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
        finite = tf.where(tf.math.is_finite(flat), tf.abs(flat), 0.0)
        largest, *numbers = comm.sum_tensors(
            [_by_rank(tf.reduce_max(finite)), *numbers],
            name=f"{name}.numbers",
            dtype=wire,
        )
        largest = tf.reduce_max(largest)
        vector = comm.sum_compressed(flat, largest, kind=compression, name=name)
        pieces = tf.split(vector, [value.shape.num_elements() for value in values])
        sums = [tf.reshape(p, v.shape) for p, v in zip(pieces, values, strict=True)]
    else:
        summed = comm.sum_tensors([*values, *numbers], name=name, dtype=wire)
        sums, numbers = summed[: len(dense)], summed[len(dense) :]
    total, by_rank, *counts = numbers
    if is_mean:
        sums = [each / total for each in sums]
    if requests is not None:
        received = tf.cast(by_rank, tf.int32)
        requests.collect(received % len(Request))
        _check_steps(received // len(Request))
    return sums, total, counts


def _check_steps(steps: Any) -> None:
    """Raise on all ranks if one of them is in a later step than others.

    Args:
        steps: The number of the step in which each rank makes this update.

    Raises:
        InvalidArgumentError: See `explain_updates`.
    """
    first = tf.reduce_min(steps)
    is_equal = tf.reduce_all(tf.equal(steps, first))
    ranks = tf.strings.as_string(tf.where(steps > first)[:, 0])
    ranks = tf.strings.reduce_join(ranks, separator=", ")
    tf.debugging.Assert(is_equal, [tf.strings.join([_MARK, ranks, _MARK])])


@contextlib.contextmanager
def explain_updates() -> Iterator[None]:
    """Context manager that raises the error of `_check_steps` as it is meant.

    Raises:
        RuntimeError: In place of TensorFlow's error.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        _, *found = str(error).split(_MARK)
        if not found:
            raise
        skipped = RuntimeError(
            "A rank made no update in a step in which others made one. Received: no "
            f"call of `optimizer.apply` on rank {found[0]}. The ranks average their "
            "gradients there. Apply zeros instead of leaving an update out, for "
            "example `tf.where(is_finite, gradient, 0.0)`; or let all ranks decide "
            "alike: `keras_dist.sum` of a flag is the same on all."
        )
        mark_known(skipped)
        raise skipped from None


def _check_same_gradients(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], number: int
) -> None:
    """Check that all ranks have gradients of the same kinds and shapes.

    Args:
        optimizer: An optimizer that averages.
        gradients: This rank's gradients; `None` where there is none.
        variables: Their variables.
        number: The number in the names of their collectives.

    Raises:
        ValueError: On all ranks, if some differ, or are new values of the variables.
    """
    options, is_merged = optimizer._averaging.options, optimizer._averaging.is_merged
    has_slices = any(isinstance(each, tf.IndexedSlices) for each in gradients)
    # Only at the first update, which all ranks trace. Later, a single rank may trace
    # again, when its last batch has a new shape.
    names = [f"gradient {index}" for index in range(len(gradients))]
    kinds = map(_describe_gradient, gradients, variables)
    paths = [getattr(v, "path", v.name) for v in variables]  # of Keras or TensorFlow
    with tf.init_scope():
        comm.agree(
            {
                "the number of gradients": len(gradients),
                "`op` and `compression`": (options.op, options.compression),
                "the number of optimizers that averaged before": number,
                "whether rows are merged": has_slices and is_merged,
            }
            | dict(zip(names, kinds, strict=True)),
            names={n: f"of {p}" for n, p in zip(names, paths, strict=True)},
            advice="Make the same model on every rank, and let every variable take "
            "part in the loss on all ranks or on none.",
        )
    overwritten = [
        v.path for v in variables if getattr(v, "overwrite_with_gradient", False)
    ]
    if overwritten:
        raise ValueError(
            "With float8, the gradients of scales are their new values, which cannot "
            f"be averaged. Received: {overwritten} on {comm.size()} ranks. Train with "
            'dtype "mixed_bfloat16", or on one process.'
        )


def _describe_gradient(gradient: Any, variable: Any) -> str:
    if gradient is None:
        return "none"
    kind = "rows of " if isinstance(gradient, tf.IndexedSlices) else ""
    return f"{kind}{gradient.dtype.name} of shape {tuple(variable.shape)}"
