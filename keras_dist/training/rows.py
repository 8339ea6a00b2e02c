"""Losses over the rows of all ranks: `sum_over_rows`, `weighted_mean`, `gather_rows`.

And `gather_loss`, for the losses of `compile` that are neither means nor sums.

The ranks average their gradients, weighted by rows: L = Σᵣ fᵣ Lᵣ, where fᵣ is the
fraction of the global batch's rows that rank r has. Each function returns what makes L,
and its gradient, the loss of one process with the global batch.

In an evaluation, while a model is built, and on one rank, they communicate nothing:
there they are the plain sum, the plain mean, and the identity.
"""

import math
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.errors import read_number
from keras_dist.lines import warn
from keras_dist.optimizer import step_context

# The MiB of targets and predictions of all ranks that a step may gather for one loss.
VARIABLE = "KERAS_DIST_GATHER_MIB"


def sum_over_rows(loss: Any) -> Any:
    """Mark a loss in your own train step as a sum over the rows of the batch.

    The ranks average their gradients, which is right for a mean over rows. This
    function multiplies a sum by the rows of all ranks ÷ the rows of this rank, so that
    the average is the sum over the rows of all ranks.

    Args:
        loss: A scalar tensor, differentiable.

    Returns:
        The scaled loss; `loss` itself on one rank, and in an evaluation.

    Raises:
        ValueError: If `loss` is not a scalar.

    Example:

    >>> float(sum_over_rows(tf.reduce_sum([1.0, 2.0])))
    3.0
    """
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise ValueError(
            "`sum_over_rows` takes a scalar, the sum over the rows of a batch. "
            f"Received: a tensor of shape {loss.shape}. Pass `tf.reduce_sum(loss)`."
        )
    context = find_joint_context()
    if context is None:
        return loss
    return loss * context.inverse_fraction(loss.dtype)


def weighted_mean(values: Any, weights: Any) -> Any:
    """Compute Σ values × weights / Σ weights over the rows of all ranks.

    Use this for a loss that divides by a number computed from its batch, such as the
    number of tokens that are not padding, or of labels that are not missing. This
    number differs between ranks and may be 0, so no average of the ranks' own means is
    the mean over all rows.

    Args:
        values: A tensor of this rank's rows, such as a loss of each token.
        weights: Numbers or booleans, in the shape of `values` or of its first axes.
            Gradients flow through them, too.

    Returns:
        This rank's part, a scalar. The average over the ranks, weighted by their rows,
        is the mean. 0 if all weights are 0.

    Raises:
        ValueError: If the shape of `weights` does not match the first axes of `values`.

    Example:

    >>> float(weighted_mean([1.0, 2.0, 6.0], [True, True, False]))
    1.5
    """
    values = tf.convert_to_tensor(values)
    weights = tf.cast(weights, values.dtype)
    missing = values.shape.rank - weights.shape.rank
    pairs = zip(weights.shape, values.shape, strict=False)
    if missing < 0 or not all(own in (None, 1, n) or n is None for own, n in pairs):
        raise ValueError(
            "The weights of `weighted_mean` must have the shape of the values, or of "
            f"their first axes. Received: values of shape {values.shape} and weights "
            f"of shape {weights.shape}"
        )
    weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))
    weights = tf.broadcast_to(weights, tf.shape(values))
    narrow = values.dtype
    if narrow.size < 4:  # sums of many rows
        values, weights = tf.cast(values, tf.float32), tf.cast(weights, tf.float32)
    numerator, divisor = tf.reduce_sum(values * weights), tf.reduce_sum(weights)
    context = find_joint_context("weighted_mean")
    if context is None:
        return tf.cast(tf.math.divide_no_nan(numerator, divisor), narrow)
    local = tf.stop_gradient(tf.stack([numerator, divisor]))
    total = context.total(context.count_own(local), purpose="weighted_mean")
    mean = tf.math.divide_no_nan(total[0], total[1])
    # Its gradient is that of the quotient of both sums: of the weights, too.
    part = numerator - mean * (divisor - tf.stop_gradient(divisor))
    part *= context.inverse_fraction(part.dtype)
    return tf.cast(tf.math.divide_no_nan(part, total[1]), narrow)


def gather_rows(z: Any) -> Any:
    """Return the rows of all ranks, in the order of the global batch; differentiable.

    Use this for losses that compare rows with one another: in-batch negatives, ranking.
    Compute the loss only from the returned rows, as on one process: then all ranks have
    the same loss, and each rank has the gradient of its own rows. A loss that compares
    this rank's rows with all rows is exact too, if it is a mean over this rank's rows.

    Args:
        z: A tensor with one entry for each row of the batch, or a structure of such
            tensors.

    Returns:
        The same structure; `z` itself on one rank, and in an evaluation.

    Raises:
        ValueError: If `z` is a scalar.
        tf.errors.InvalidArgumentError: If the number of rows in `z` differs from the
            batch of `dist_fit`.

    Example:

    >>> gather_rows(tf.constant([[1.0], [2.0]])).shape
    TensorShape([2, 1])
    """
    context = find_joint_context("gather_rows")
    if context is None:
        return z
    leaves = [
        _check_rows(tf.convert_to_tensor(leaf), context)
        for leaf in keras.tree.flatten(z)
    ]
    return keras.tree.pack_sequence_as(z, _gather_tensors(leaves, context))


def gather_loss(compute: Callable[[dict[str, Any]], Any], rows: dict[str, Any]) -> Any:
    """Compute a loss of `compile` from the rows of all ranks, on each of them.

    Targets and predictions are small beside a model. Each rank has the gradient with
    respect to its own rows; by the chain rule the ranks' gradients add up to that of
    one process, whatever the loss does with the rows.

    Args:
        compute: Computes the loss from its arguments by name, some of which may be
            `None`; it reads the mask and the logits of the predictions.
        rows: This rank's rows of them.

    Returns:
        The loss of all rows; `None` if it cannot be computed: XLA compiles the step, or
        more than `KERAS_DIST_GATHER_MIB` would be sent.
    """
    context = step_context.current()
    found = rows.get("y_pred")
    masks = keras.tree.map_structure(private.mask_of, found)
    pieces = rows, masks, keras.tree.map_structure(private.logits_of, found)
    tensors = [leaf for leaf in keras.tree.flatten(pieces) if leaf is not None]
    reason = _why_not_gathered(tensors, context)
    if reason:
        if context.trial is None and comm.rank() == 0:
            warn(
                "A loss of `compile` that compares the rows of the batch with one "
                "another is not that of one process: each rank computes it from its "
                f"own rows, and the ranks average it. Received: {reason}."
            )
        return None

    def has_rows(leaf: Any) -> bool:
        return leaf is not None and leaf.shape.rank > 0

    gathered = iter(
        _gather_tensors(list(filter(has_rows, tensors)), context, is_shared=True)
    )
    rows, masks, logits = keras.tree.map_structure(
        lambda leaf: next(gathered) if has_rows(leaf) else leaf, pieces
    )
    keras.tree.map_structure(private.set_mask, rows.get("y_pred"), masks)
    keras.tree.map_structure(private.set_logits, rows.get("y_pred"), logits)
    return compute(rows)


def _gather_tensors(
    tensors: list[Any], context: step_context.StepContext, *, is_shared: bool = False
) -> list[Any]:
    """Return the rows of all ranks in the order in which one process reads them.

    Args:
        tensors: Tensors with the rows of this rank, to which gradients go.
        context: The train step's.
        is_shared: Whether all ranks compute the same loss, of gathered rows alone. Then
            the gradient of this rank's rows is known here, without a collective.
    """
    if context.trial is not None:
        return [context.trial.gather(t, is_known=is_shared) for t in tensors]
    lengths = [tf.shape(_take_counted(tensors[0], context))[:1]]
    lengths += [tf.shape(t)[1:] for t in tensors if None in t.shape[1:]]
    lengths = tf.concat(lengths, 0)
    every = comm.gather_rows(lengths[tf.newaxis], name=comm.name_of("row_counts"))
    counts = every[:, 0]
    if lengths.shape[0] > 1:
        message = "Rows of a loss have other lengths on other ranks"
        check = tf.debugging.assert_equal(every[:, 1:], every[:1, 1:], message)
        with tf.control_dependencies([check] if check is not None else []):
            counts = tf.identity(counts)
    begin = tf.reduce_sum(counts[: comm.rank()])
    end = begin + counts[comm.rank()]

    def gather(tensor: Any) -> Any:
        name = comm.name_of("gathered_rows")
        rows = comm.gather_rows(_take_counted(tensor, context), name=name)
        return tf.ensure_shape(rows, [None, *tensor.shape[1:]])

    def take_local(upstream: Any, length: Any) -> Any:
        """Return the gradient of this rank's rows, to be weighted by its fraction."""
        upstream = tf.convert_to_tensor(upstream)
        if not is_shared:
            upstream *= context.row_fraction(upstream.dtype)
            upstream = comm.total(upstream, purpose="gathered_gradients")
        local = upstream[begin:end]
        local *= context.inverse_fraction(local.dtype)
        left = length - tf.shape(local)[0]  # of a copied batch, or none
        return tf.pad(local, [[0, left], *[[0, 0]] * (local.shape.rank - 1)])

    @tf.custom_gradient
    def gather_differentiable(tensor: Any) -> Any:
        length = tf.shape(tensor)[0]
        return gather(tensor), lambda upstream: take_local(upstream, length)

    return [
        gather_differentiable(tensor) if tensor.dtype.is_floating else gather(tensor)
        for tensor in tensors
    ]


def _take_counted(tensor: Any, context: step_context.StepContext) -> Any:
    """Return the rows of a tensor; none if they are copies of another rank's."""
    if context.has_rows is None:
        return tensor
    return tensor[: tf.shape(tensor)[0] * tf.cast(context.has_rows, tf.int32)]


def _check_rows(tensor: Any, context: step_context.StepContext) -> Any:
    """Return a tensor that has the rows of this rank's batch, or raise."""
    if context.rows is None:
        return tensor
    message = (
        "`gather_rows` takes a tensor with one entry for each row of the batch, "
        "since it puts the rows of all ranks in the order of the global batch. "
        "Gather parts of another length one by one. "
        f"Received: a tensor of shape {tensor.shape}, and another number of rows in "
        "the batch."
    )
    if tensor.shape.rank == 0:
        raise ValueError(message)
    count = tf.shape(_take_counted(tensor, context))[0]
    check = tf.debugging.assert_equal(count, tf.cast(context.rows, tf.int32), message)
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(tensor)


def _why_not_gathered(
    tensors: list[Any], context: step_context.StepContext
) -> str | None:
    """Say why the rows of tensors are not sent to all ranks; `None` if they are."""
    if context.is_compiled:
        return "`jit_compile`, and XLA compiles nothing that communicates"
    if not all(isinstance(tensor, tf.Tensor) for tensor in tensors):
        return "ragged or sparse tensors"
    shapes = [tensor.shape for tensor in tensors if tensor.shape.rank]
    is_known = all(None not in shape[1:] for shape in shapes)
    if not (is_known or context.shares_batch):
        return f"rows of the shapes {shapes}, which may differ from rank to rank"
    if len({shape[0] for shape in shapes} - {None}) > 1:
        return f"targets and predictions of the shapes {shapes}"
    limit = most_mib()
    row_size = sum(map(row_bytes, tensors)) if is_known else 0  # the trial knew it
    mib = row_size * (context.global_rows or 0) / 2**20
    if mib > limit:
        return (
            f"{mib:.1f} MiB of targets and predictions in a step, of which at most "
            f"{limit:g} MiB are sent to all ranks ({VARIABLE})"
        )
    return None


def most_mib() -> float:
    """Return the MiB that a step may gather.

    Raises:
        ValueError: If the variable holds no number of at least 0.
    """
    return read_number(os.environ.get(VARIABLE, 16), name=VARIABLE, unit="MiB")


def row_bytes(tensor: Any) -> int:
    """Count the bytes in which a row is sent."""
    shape, dtype = tensor.shape, tensor.dtype
    width = max(4, dtype.size) if dtype.is_floating or dtype == tf.int32 else 8
    return math.prod(shape[1:]) * width if shape.rank else 0


def find_joint_context(caller: str = "") -> step_context.StepContext | None:
    """Return the context of a step whose ranks communicate; `None` if none do.

    Outside of a step of ours, a loop of the user's communicates.

    Args:
        caller: The function that needs a collective; "" if none does.

    Raises:
        RuntimeError: If XLA compiles the step, and `caller` is given.
    """
    context = step_context.current()
    if context.trial is not None and context.rows is not None:
        return context
    if comm.size() == 1 or (step_context.is_inside() and context.rows is None):
        return None
    if caller and context.is_compiled:
        raise RuntimeError(
            f"`{caller}` communicates with the other ranks, which XLA cannot compile"
        )
    return context
