"""From a rank's own gradients to those that Keras applies: one exchange a dtype."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, get_args

import tensorflow as tf

from keras_dist import comm, private
from keras_dist.errors import mark_known
from keras_dist.optimizer import sparse, step_context
from keras_dist.optimizer.accumulation import accumulates, is_update, take
from keras_dist.optimizer.nested import nested_optimizers, variables_of
from keras_dist.optimizer.sparse import Lookups, times, with_shape

# Horovod matches collectives by name, and Keras's names repeat. An optimizer gets its
# number where all ranks compare its gradients, so that they count alike.
_numbers = count()

# Around the ranks in an error of TensorFlow.
_MARK = "keras_dist: no update of rank "

# A float32 holds these integers.
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
        if self.op not in get_args(Op):
            raise ValueError(
                f'`op` must be "average" or "sum". Received: op={self.op!r}'
            )
        if self.compression not in (None, *get_args(Compression)):
            raise ValueError(
                '`compression` must be None, "fp16" or "bf16". '
                f"Received: compression={self.compression!r}"
            )


@dataclass
class AveragingState:
    """The state of an optimizer that averages, for one train function.

    Args:
        options: The options of the averaging.
        number: Part of the names of its collectives; `None` before the ranks have
            compared their gradients' shapes and dtypes.
        is_merged: Whether repeated rows of sparse gradients are added up before the
            exchange; `None` before the first of them.
        lookups: Which tables are read once for all rows of a batch.
    """

    options: Averaging
    number: int | None = None
    is_merged: bool | None = None
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
        number = next(_numbers)
        _check_same_gradients(gradients, known, state.options, number)
        state.number = number
    if accumulates(optimizer) and not optimizer.built:
        with tf.init_scope():
            optimizer.build(known)
    present = [
        (gradient, variable)
        for gradient, variable in zip(gradients, known, strict=True)
        if gradient is not None
    ]
    average = _accumulate if accumulates(optimizer) else _average
    averaged = iter(average(optimizer, present, is_sum=is_sum))
    return [None if gradient is None else next(averaged) for gradient in gradients]


def mark_recorded(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
) -> list[Any]:
    """A rank's own gradients in a graph, as `reduce_gradients` takes them outside.

    Outside of a compiled function nothing shows any more how a table was read.
    """
    state: AveragingState = optimizer._averaging
    known = variables_of(optimizer, variables)
    if comm.size() == 1 or accumulates(optimizer):
        return list(gradients)
    return [
        state.lookups.mark(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient, variable in zip(gradients, known, strict=True)
    ]


def weight_loss(optimizer: Any, loss: Any) -> Any:
    """Multiply the loss by this rank's fraction of the rows, if it is known.

    Then the gradients only have to be summed. To multiply each gradient, and to divide
    the sums, would read and write all of their bytes twice more.
    """
    state: AveragingState = optimizer._averaging
    is_possible = (
        comm.size() > 1
        and state.options == Averaging()
        and not accumulates(optimizer)
        and _keeps_digits(loss, optimizer)
    )
    return step_context.current().weight_loss(loss, state) if is_possible else loss


def _keeps_digits(loss: Any, optimizer: Any) -> bool:
    """Tell whether a fraction in the loss's dtype is precise enough."""
    variables = private.trainable_variables_of(optimizer)
    is_double = any(str(v.dtype).endswith("float64") for v in variables)
    return loss.dtype == tf.float64 or (loss.dtype == tf.float32 and not is_double)


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
    if is_sum or context.is_weighted(state):
        weight = None
    local = [with_shape(*pair) for pair in pairs]
    if is_sum and context.has_rows is not None:
        local = [times(g, tf.cast(context.has_rows, g.dtype)) for g in local]
    variables = [variable for _, variable in pairs]
    name = f"keras_dist.gradients.{state.number}"
    is_merged = _is_merged(optimizer, local)
    prepare = lookups.unmarked if is_merged else lookups.before_gather
    local = [_counted(prepare(*pair)) for pair in zip(local, variables, strict=True)]
    result = exchange(local, weight, state.options, is_merged=is_merged, name=name)
    if not is_merged:
        lengths = [_num_slices(gradient) for gradient in local]
        result = [
            lookups.after_gather(*each, rows=context.rows, name=name)
            for each in zip(result, lengths, variables, strict=True)
        ]
    is_scaled = len(nested_optimizers(optimizer)) > 1
    return [
        _as_applied(tf.cast(averaged, gradient.dtype), is_scaled)
        for averaged, (gradient, _) in zip(result, pairs, strict=True)
    ]


def _counted(gradient: Any) -> Any:
    """A gradient without slices, if this rank's batch is a copy of another rank's.

    A slice of zeros is not nothing: some optimizers decay the row that it is of.
    """
    has_rows = step_context.current().has_rows
    if has_rows is None or not isinstance(gradient, tf.IndexedSlices):
        return gradient
    count = tf.shape(gradient.indices)[0] * tf.cast(has_rows, tf.int32)
    values, indices = gradient.values[:count], gradient.indices[:count]
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _num_slices(gradient: Any) -> Any:
    is_rows = isinstance(gradient, tf.IndexedSlices)
    return tf.shape(gradient.indices)[0] if is_rows else None


def _is_merged(optimizer: Any, gradients: Sequence[Any]) -> bool:
    """Return True if repeated rows are added up before they are sent; on all ranks."""
    state: AveragingState = optimizer._averaging
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return False
    if state.is_merged is None:
        is_merged = sparse.may_merge(optimizer)
        if not is_merged:
            with tf.init_scope():
                is_merged = not all(comm.gather(sparse.is_ordered()))
        state.is_merged = is_merged
    return state.is_merged


def _as_applied(gradient: Any, is_scaled: bool) -> Any:
    """An averaged gradient as the optimizer gets it."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    return sparse.all_or_none_finite(gradient) if is_rows and is_scaled else gradient


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
            factor = context.counted(tf.ones((), tf.float64))
        options = replace(options, op="sum")
    local: list[Any] = [
        tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)
        for gradient, _ in pairs
    ]
    variables = [variable for _, variable in pairs]
    accumulators = private.accumulators(optimizer, variables)

    def update() -> list[Any]:
        added_up = [take(a, g) for a, g in zip(accumulators, local, strict=True)]
        name = f"keras_dist.accumulated.{state.number}"
        sums = exchange(added_up, 1, options, name=name)
        return [tf.cast(s, g.dtype) for s, g in zip(sums, local, strict=True)]

    if not local:
        return []
    return tf.cond(is_update(optimizer), update, lambda: list(local))


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
    if weight is None:
        options = replace(options, op="sum")
    if options.op != "average":
        weight = 1
    result: list[Any] = [None] * len(gradients)
    wires = [_wire_of(gradient) for gradient in gradients]
    for wire in sorted(set(wires), key=str):
        indices = [index for index, own in enumerate(wires) if own == wire]
        summed = _sums(
            [gradients[index] for index in indices],
            tf.cast(weight, wire),
            options,
            is_merged=is_merged,
            name=f"{name}.{wire.name}",
        )
        for index, gradient in zip(indices, summed, strict=True):
            result[index] = gradient
    return result


def _sums(
    gradients: list[Any],
    weight: Any,
    options: Averaging,
    *,
    is_merged: bool,
    name: str,
) -> list[Any]:
    """See `exchange`; for gradients that are all sent in the dtype of `weight`."""
    wire = weight.dtype
    is_rows = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    both = list(zip(gradients, is_rows, strict=True))
    rows = [gradient for gradient, is_sparse in both if is_sparse]
    dense = [tf.cast(gradient, wire) for gradient, is_sparse in both if not is_sparse]
    counts = []
    if is_merged:
        rows = [sparse.merged(gradient) for gradient in rows]
        counts = [sparse.counts_of_ranks(gradient, wire) for gradient in rows]
    sums, total, counts = _dense_sums(dense, weight, counts, options, name=name)
    merged_counts = counts if is_merged else None
    of_rows = _sums_of_rows(rows, weight, total, merged_counts, options, name=name)
    kinds = {True: iter(of_rows), False: iter(sums)}
    return [next(kinds[is_sparse]) for is_sparse in is_rows]


def _sums_of_rows(
    rows: list[Any],
    weight: Any,
    total: Any,
    counts: list[Any] | None,
    options: Averaging,
    *,
    name: str,
) -> list[Any]:
    """Means or sums of sparse gradients: whole ones if merged, otherwise slices.

    Args:
        rows: The gradients; if they are to be merged, each row once.
        weight: The weight of this rank's gradients.
        total: The sum of the weights.
        counts: The number of rows of each rank for each gradient, if they are merged;
            else `None`.
        options: The options of the averaging.
        name: A fixed name, the same on all ranks.
    """
    is_mean = options.op == "average"
    result: list[Any] = []
    for index, own in enumerate(rows):
        own_name, shape = f"{name}.{index}", tuple(own.shape)
        values = tf.cast(own.values, weight.dtype)
        weighted = tf.IndexedSlices(values * weight if is_mean else values, own.indices)
        if counts is not None:
            whole = sparse.sum_of_ranks(weighted, shape, counts[index], name=own_name)
            result.append(whole / total if is_mean else whole)
        else:
            all_rows = sparse.gathered(weighted, shape, name=own_name)
            divided = all_rows.values / total if is_mean else all_rows.values
            slices = tf.IndexedSlices(divided, all_rows.indices, all_rows.dense_shape)
            result.append(slices)
    return result


def _dense_sums(
    dense: list[Any],
    weight: Any,
    counts: list[Any],
    options: Averaging,
    *,
    name: str,
) -> tuple[list[Any], Any, list[Any]]:
    """Means or sums of dense gradients, of the weights, and of counts of rows.

    The stop request, and the number of each rank's step, are summed with them.
    """
    wire = weight.dtype
    is_mean = options.op == "average"
    context = step_context.current()
    stop_request = context.stop_request
    step = 0 if context.step is None else context.step % _MOST_STEPS
    asked = 0 if stop_request is None else stop_request.as_tensor(wire)
    if options.compression and wire == tf.float32 and dense:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in dense], axis=0)
        # One number a rank: twice its step, and one more if it has a request.
        vector, total, numbers = comm.sum_compressed(
            flat,
            weight,
            kind=options.compression,
            name=name,
            is_mean=is_mean,
            extra=tf.cast(2 * step, wire) + asked,
        )
        pieces = tf.split(vector, [tensor.shape.num_elements() for tensor in dense])
        sums = [tf.reshape(p, t.shape) for p, t in zip(pieces, dense, strict=True)]
        counts = comm.sum_tensors(counts, name=f"{name}.counts", dtype=wire)
        agreed, steps = tf.reduce_sum(numbers % 2), numbers // 2
    else:
        weighted = [tensor * weight for tensor in dense] if is_mean else dense
        of_rank = tf.one_hot(comm.rank(), comm.size(), dtype=wire)
        summed = comm.sum_tensors(
            [*weighted, weight, asked, tf.cast(step, wire) * of_rank, *counts],
            name=name,
            dtype=wire,
        )
        sums, (total, agreed, steps, *counts) = (
            summed[: len(dense)],
            summed[len(dense) :],
        )
        if is_mean:
            sums = [each / total for each in sums]
    if stop_request is not None:
        stop_request.collect(agreed)
    if context.step is not None:
        _check_steps(steps)
    return sums, total, counts


def _check_steps(steps: Any) -> None:
    """Raise on all ranks if one of them is in a later step than others.

    Args:
        steps: The number of the step in which each rank makes this update.

    Raises:
        RuntimeError: From a graph as an InvalidArgumentError: see `explain_updates`.
    """
    first = tf.reduce_min(steps)
    is_equal = tf.reduce_all(tf.equal(steps, first))
    if tf.executing_eagerly():
        if not is_equal:
            ranks = ", ".join(map(str, tf.where(steps > first)[:, 0].numpy()))
            raise _describe_skipped(ranks)
        return
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
        raise _describe_skipped(found[0]) from None


def _describe_skipped(ranks: str) -> RuntimeError:
    error = RuntimeError(
        "A rank made no update in a step in which others made one. Received: no call "
        f"of `optimizer.apply` on rank {ranks}. The ranks average their gradients "
        "there. Apply zeros instead of leaving an update out, for example "
        "`tf.where(is_finite, gradient, 0.0)`; or let all ranks decide alike: "
        "`keras_dist.sum` of a flag is the same on all."
    )
    mark_known(error)
    return error


def _wire_of(gradient: Any) -> Any:
    """Return the dtype in which a gradient is sent and summed.

    Horovod does not support bfloat16, and float16 is too narrow for a sum.
    """
    return tf.float64 if gradient.dtype == tf.float64 else tf.float32


def _check_same_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    options: Averaging,
    number: int,
) -> None:
    """Check that all ranks have gradients of the same kinds and shapes.

    Args:
        gradients: Those of this rank; `None` where there is none.
        variables: Their variables.
        options: How they are going to be averaged.
        number: The number in the names of their collectives.

    Raises:
        ValueError: On all ranks, if some differ.
    """
    # Only at the first update, which all ranks trace. Later, a single rank may trace
    # again, when its last batch has a new shape.
    own = {
        f"gradient {index}": (gradient, variable)
        for index, (gradient, variable) in enumerate(
            zip(gradients, variables, strict=True)
        )
    }
    with tf.init_scope():
        comm.agree(
            {
                "the number of gradients": len(gradients),
                "`op` and `compression`": (options.op, options.compression),
                "the number of optimizers that averaged before": number,
            }
            | {name: _described(*pair) for name, pair in own.items()},
            names={
                name: f"of {_name(variable)}" for name, (_, variable) in own.items()
            },
            advice="Make the same model on every rank, and let every variable take "
            "part in the loss on all ranks or on none.",
        )


def _name(variable: Any) -> str:
    """Return the variable's path in the model; the name of a plain `tf.Variable`."""
    return getattr(variable, "path", variable.name)


def _described(gradient: Any, variable: Any) -> str:
    if gradient is None:
        return "none"
    kind = "rows of " if isinstance(gradient, tf.IndexedSlices) else ""
    return f"{kind}{gradient.dtype.name} of shape {tuple(variable.shape)}"
