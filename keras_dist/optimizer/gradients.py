"""From a rank's own gradients to those that Keras applies."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import sparse, step_context
from keras_dist.optimizer.accumulation import (
    accumulates,
    accumulators_of,
    is_update,
    take,
)
from keras_dist.optimizer.batch_slices import Lookups
from keras_dist.optimizer.exchange import exchange
from keras_dist.optimizer.local_steps import (
    LocalProgress,
    before_update,
    uses_local_sgd,
)
from keras_dist.optimizer.nested import nested_optimizers, variables_of
from keras_dist.optimizer.options import Averaging
from keras_dist.optimizer.same_gradients import check_same_gradients
from keras_dist.optimizer.sparse import with_shape


@dataclass
class State:
    """The state of an optimizer that averages.

    Args:
        number: The number of the optimizer, the same on all ranks.
        options: The options of the averaging.
        is_checked: Whether the ranks have compared their gradients' shapes and dtypes.
        is_merged: Whether repeated rows of sparse gradients are added up before the
            exchange; `None` before the first of them.
        lookups: Which tables are read once for all rows of a batch.
        is_watched: Whether a NaN guard checks each batch.
        is_only_watched: Whether the optimizer has its mixin only for the guard.
        progress: Under local SGD, the steps since the last averaging.
    """

    number: int
    options: Averaging
    is_checked: bool = False
    is_merged: bool | None = None
    lookups: Lookups = field(default_factory=Lookups)
    is_watched: bool = False
    is_only_watched: bool = False
    progress: LocalProgress | None = None


def average_gradients(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
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
    """
    state: State = optimizer._averaging
    known = variables_of(optimizer, variables)
    with comm.within(state.options.process_set):
        if comm.size() == 1:
            return list(gradients)
        local = state.options.local_ids()
        is_shared = [
            gradient is not None and id(variable) not in local
            for gradient, variable in zip(gradients, known, strict=True)
        ]
        if not state.is_checked:
            check_same_gradients(gradients, known, local)
            state.is_checked = True
        if uses_local_sgd(optimizer):
            before_update(optimizer)
            return list(gradients)
        if accumulates(optimizer) and not optimizer.built:
            with tf.init_scope():
                optimizer.build(known)
        average = _accumulated if accumulates(optimizer) else _averaged
        stopwatch = step_context.current().stopwatch
        if stopwatch is None:
            return average(optimizer, gradients, known, is_shared)
        begin = stopwatch.begin_exchange(gradients)
        result = average(optimizer, gradients, known, is_shared)
        stopwatch.end_exchange(begin, result)
        return result


def mark_recorded(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
) -> list[Any]:
    """A rank's own gradients in a graph, as `average_gradients` takes them outside.

    Outside of a compiled function nothing shows any more how a table was read.
    """
    state: State = optimizer._averaging
    known = variables_of(optimizer, variables)
    with comm.within(state.options.process_set):
        is_single = comm.size() == 1
    if is_single or accumulates(optimizer) or uses_local_sgd(optimizer):
        return list(gradients)
    local = state.options.local_ids()
    return [
        state.lookups.mark(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices) and id(variable) not in local
        else gradient
        for gradient, variable in zip(gradients, known, strict=True)
    ]


def weight_loss(optimizer: Any, loss: Any) -> Any:
    """The loss × this rank's fraction of the rows, if that is known before the step.

    Then the gradients only have to be summed. To multiply each gradient, and to divide
    the sums, would read and write all of their bytes twice more.
    """
    state: State = optimizer._averaging
    options, before = state.options, comm.size()
    with comm.within(options.process_set):
        is_possible = (
            comm.size() == before > 1
            and options.op == "average"
            and not options.compression
            and options.every == 1
            and not accumulates(optimizer)
            and _keeps_digits(loss, optimizer)
        )
        return step_context.current().weight_loss(loss, state) if is_possible else loss


def _keeps_digits(loss: Any, optimizer: Any) -> bool:
    """Whether a fraction in the loss's dtype is precise enough for all gradients."""
    variables = getattr(optimizer, "_trainable_variables", None) or []
    is_double = any(str(v.dtype).endswith("float64") for v in variables)
    return loss.dtype == tf.float64 or (loss.dtype == tf.float32 and not is_double)


def _averaged(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    is_shared: Sequence[bool],
) -> list[Any]:
    state: State = optimizer._averaging
    context = step_context.current()
    weight = 1 if context.rows is None else context.rows
    if context.is_weighted(state):
        weight = None
    counted = [v for v, counts in zip(variables, is_shared, strict=True) if counts]
    shared = [
        with_shape(gradient, variable)
        for gradient, variable, counts in zip(
            gradients, variables, is_shared, strict=True
        )
        if counts
    ]
    name = f"keras_dist.gradients.{state.number}"
    options = replace(state.options, sparse=_form_of_rows(optimizer, shared))
    prepare = state.lookups.unmarked
    if options.sparse == "repeated":
        prepare = state.lookups.before_gather
    own = [_counted(prepare(*pair)) for pair in zip(shared, counted, strict=True)]
    result, total = exchange(own, weight, options, name=name)
    if options.sparse == "repeated":
        lengths = [_num_slices(gradient) for gradient in own]
        result = [
            state.lookups.after_gather(*of_one, rows=context.rows, name=name)
            for of_one in zip(result, lengths, counted, strict=True)
        ]
    everyone = iter(result)
    is_scaled = len(nested_optimizers(optimizer)) > 1
    return [
        _part(gradient, weight, total, state.options)
        if gradient is None or not counts
        else _applied(tf.cast(next(everyone), gradient.dtype), is_scaled)
        for gradient, counts in zip(gradients, is_shared, strict=True)
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


def _part(gradient: Any, weight: Any, total: Any, options: Averaging) -> Any:
    """The gradient of a local layer's variable, as part of the global batch's loss."""
    if gradient is None or options.op != "average" or weight is None:
        return gradient
    if total is None:
        factor = step_context.current().row_fraction(gradient.dtype)
    else:
        factor = tf.cast(weight, gradient.dtype) / tf.cast(total, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * factor
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) * factor


def _form_of_rows(optimizer: Any, gradients: Sequence[Any]) -> str:
    """How repeated rows are sent, the same on all ranks: merged or repeated."""
    state: State = optimizer._averaging
    asked = state.options.sparse
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return asked
    if state.is_merged is None:
        is_whole = asked == "merged" or state.options.op == "adasum"
        is_merged = is_whole or sparse.may_merge(optimizer)
        if asked == "auto" and not is_merged:
            with tf.init_scope():
                is_merged = not all(comm.gather(sparse.is_ordered()))
        state.is_merged = is_merged
    return "merged" if state.is_merged else "repeated"


def _applied(gradient: Any, is_scaled: bool) -> Any:
    """An averaged gradient as the optimizer gets it."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    return sparse.all_or_none_finite(gradient) if is_rows and is_scaled else gradient


def _accumulated(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    is_shared: Sequence[bool],
) -> list[Any]:
    """Each rank adds up its own part; the ranks exchange when an update is due."""
    state: State = optimizer._averaging
    options = state.options
    factor = 1.0
    if options.op == "average":
        factor = step_context.current().row_fraction(tf.float64)
        options = replace(options, op="sum")
    weighted = [
        None
        if gradient is None
        else tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)
        for gradient in gradients
    ]
    indices = [index for index, counts in enumerate(is_shared) if counts]
    own: list[Any] = [weighted[index] for index in indices]
    accumulators = accumulators_of(optimizer, [variables[index] for index in indices])

    def update() -> list[Any]:
        added_up = [take(a, g) for a, g in zip(accumulators, own, strict=True)]
        name = f"keras_dist.accumulated.{state.number}"
        sums, _ = exchange(added_up, 1, options, name=name)
        return [tf.cast(s, g.dtype) for s, g in zip(sums, own, strict=True)]

    result = tf.cond(is_update(optimizer), update, lambda: list(own)) if own else []
    for index, gradient in zip(indices, result, strict=True):
        weighted[index] = gradient
    return weighted
