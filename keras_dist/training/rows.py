"""Losses over the rows of all ranks: `sum_over_rows`, `weighted_mean`, `gather_rows`.

The ranks average their gradients, weighted by rows: L = Σᵣ fᵣ Lᵣ, where fᵣ is the
fraction of the global batch's rows that rank r has. Each function returns what makes L,
and its gradient, the loss of one process with the global batch.

In an evaluation, while a model is built, and on one rank, they communicate nothing:
there they are the plain sum, the plain mean, and the identity.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm
from keras_dist.optimizer import step_context


def sum_over_rows(loss: Any) -> Any:
    """Mark a loss that is a sum over the rows of the batch, in a step of your own.

    Gradients of several ranks are averaged, as those of a mean have to be. A sum is
    multiplied here by the rows of all ranks ÷ the rows of this rank, so that the
    average is the sum over the rows of all ranks.

    Args:
        loss: A scalar tensor, differentiable.

    Returns:
        The same on one rank, and in an evaluation.

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
    context = _communicating_context()
    if context is None:
        return loss
    factor = _inverse(context.row_fraction(tf.float64))
    return step_context.make_known(loss * tf.cast(factor, loss.dtype), "mean")


def weighted_mean(values: Any, weights: Any) -> Any:
    """Compute Σ values × weights / Σ weights over the rows of all ranks.

    It is for losses that divide by a number of their batch: of tokens that are not
    padding, or of labels that are not missing. Each rank has another such number, and
    a rank may have 0, so that no average of the ranks' own means is that of all rows.

    Args:
        values: A tensor of this rank's rows, such as a loss of each token.
        weights: Of the same shape, or the first of its axes alone: numbers or booleans,
            differentiable too.

    Returns:
        This rank's part, a scalar. The average over the ranks, weighted by their rows,
        is the mean. 0 if all weights are 0.

    Raises:
        ValueError: If `weights` has other axes than `values`.

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
    context = _communicating_context("weighted_mean")
    if context is None:
        return tf.cast(tf.math.divide_no_nan(numerator, divisor), narrow)
    local = tf.stop_gradient(tf.stack([numerator, divisor]))
    total = comm.total(context.counted(local), purpose="weighted_mean")
    mean = tf.math.divide_no_nan(total[0], total[1])
    # Its gradient is that of the quotient of both sums: of the weights, too.
    part = numerator - mean * (divisor - tf.stop_gradient(divisor))
    factor = _inverse(context.row_fraction(tf.float64))
    part *= tf.cast(factor, part.dtype)
    return step_context.make_known(
        tf.cast(tf.math.divide_no_nan(part, total[1]), narrow), "mean"
    )


def gather_rows(z: Any) -> Any:
    """Return the rows of all ranks, in the order of the global batch; differentiable.

    It is for losses that compare rows with one another: in-batch negatives, ranking.
    Compute the loss from what this returns alone, as on one process: all ranks then
    have the same loss, and each the gradient of its rows. A loss of this rank's rows
    against all rows is exact too, if it is a mean over them.

    Args:
        z: A tensor with one entry for each row of the batch, or a structure of such
            tensors.

    Returns:
        The same structure; `z` itself on one rank, and in an evaluation.

    Raises:
        ValueError: If `z` has another number of rows than the batch of `dist_fit`;
            `tf.errors.InvalidArgumentError` if that is only known when the step runs.

    Example:

    >>> gather_rows(tf.constant([[1.0], [2.0]])).shape
    TensorShape([2, 1])
    """
    context = _communicating_context("gather_rows")
    if context is None:
        return z
    return keras.tree.map_structure(GlobalBatch(context).gather, z)


class GlobalBatch:
    """Gathers rows of all ranks into the order in which one process reads them.

    Args:
        context: The train step's.
        is_shared: Whether all ranks compute the same loss, of gathered rows alone. Then
            the gradient of this rank's rows is known here, without a collective.
    """

    def __init__(
        self, context: step_context.StepContext, *, is_shared: bool = False
    ) -> None:
        self._context = context
        self._is_shared = is_shared
        self._order: Any = None
        self._places: Any = None
        self.fraction = context.row_fraction(tf.float64)

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks of a tensor; the gradient goes to its own."""
        tensor = self._check_rows(tf.convert_to_tensor(tensor))
        if self._order is None:
            self._set_order(tensor)
        # A loss that is computed from it needs no factor.
        if not tensor.dtype.is_floating:
            return step_context.make_known(self._gather(tensor), "constant")

        @tf.custom_gradient
        def gather(tensor: Any) -> Any:
            return self._gather(tensor), lambda upstream: self._own(upstream, tensor)

        return step_context.make_known(gather(tensor), "constant")

    def _gather(self, tensor: Any) -> Any:
        name = comm.name_of("gathered_rows")
        rows = comm.gather_rows(self._counted(tensor), name=name)
        return tf.gather(tf.ensure_shape(rows, [None, *tensor.shape[1:]]), self._order)

    def _own(self, upstream: Any, tensor: Any) -> Any:
        """Return the gradient of this rank's rows, to be weighted by its fraction."""
        upstream = tf.convert_to_tensor(upstream)
        if not self._is_shared:
            upstream *= tf.cast(self.fraction, upstream.dtype)
            upstream = comm.total(upstream, purpose="gathered_gradients")
        own = tf.gather(upstream, self._places)
        own *= tf.cast(_inverse(self.fraction), own.dtype)
        if self._context.has_rows is None:
            return own
        left = tf.shape(tensor)[0] - tf.shape(own)[0]  # of a copied batch
        return tf.pad(own, [[0, left], *[[0, 0]] * (own.shape.rank - 1)])

    def _counted(self, tensor: Any) -> Any:
        has_rows = self._context.has_rows
        if has_rows is None:
            return tensor
        return tensor[: tf.shape(tensor)[0] * tf.cast(has_rows, tf.int32)]

    def _set_order(self, tensor: Any) -> None:
        count = tf.shape(self._counted(tensor))[:1]
        counts = comm.gather_rows(count, name=comm.name_of("row_counts"))
        ranks = tf.repeat(tf.range(comm.size()), counts)
        self._order = tf.range(tf.size(ranks))
        if self._context.is_strided:
            number = self._order - tf.gather(tf.cumsum(counts, exclusive=True), ranks)
            self._order = tf.argsort(number * comm.size() + ranks)
        is_own = tf.equal(tf.gather(ranks, self._order), comm.rank())
        self._places = tf.where(is_own)[:, 0]

    def _check_rows(self, tensor: Any) -> Any:
        """Return a tensor that has the rows of this rank's batch, or raise."""
        rows, expected = self._context.rows, self._context.length
        found = tensor.shape[0] if tensor.shape.rank else 0
        message = (
            "`gather_rows` takes a tensor with one entry for each row of the batch, "
            "since it puts the rows of all ranks in the order of the global batch. "
            "Gather parts of another length one by one."
        )
        if rows is None or found == expected is not None:
            return tensor
        if None not in (found, expected) or found == 0:
            raise ValueError(
                f"{message} Received: shape {tensor.shape} and a batch of "
                f"{'?' if expected is None else expected} rows."
            )
        count = tf.shape(self._counted(tensor))[0]
        check = tf.debugging.assert_equal(count, tf.cast(rows, tf.int32), message)
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(tensor)


def _communicating_context(caller: str = "") -> step_context.StepContext | None:
    """Return the context of a step whose ranks communicate; `None` if none do.

    Outside of a step of ours, a loop of the user's communicates.

    Args:
        caller: The function that needs a collective; "" if none does.

    Raises:
        RuntimeError: If XLA compiles the step, and `caller` is given.
    """
    context = step_context.current()
    if comm.size() == 1 or (step_context.is_inside() and context.rows is None):
        return None
    if caller and context.is_compiled:
        raise RuntimeError(
            f"`{caller}` communicates with the other ranks, which XLA cannot compile"
        )
    return context


def _inverse(fraction: Any) -> Any:
    """1 / a rank's fraction of the rows; 0 for a rank that has none."""
    return tf.math.divide_no_nan(tf.ones((), fraction.dtype), fraction)
