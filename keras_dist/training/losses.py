"""A rank's losses and logged numbers, as its parts of the global batch's.

The ranks average their gradients, weighted by rows: Σᵣ fᵣ gᵣ, where fᵣ is the fraction
of the global batch's rows that rank r has. That is the gradient of one process if each
rank's loss is a mean over its rows. A loss that is something else is multiplied first:

- a sum over rows by 1 / fᵣ;
- a sum divided by another sum, such as the number of elements that are not masked, by
  this rank's part of that sum over all ranks, / fᵣ;
- a loss that compares rows with one another is computed from the rows of all ranks.

Keras's losses *declare* which of these they are, by their reduction, masks and sample
weights. All others are *tried* on the first batch (`trial`), and `LossKinds` says what
was found. The same holds for the numbers that a step logs, which are averaged, too.

Only objects of one model are changed, while its step runs or is traced.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.optimizer import step_context
from keras_dist.training.metrics import stateful_metrics
from keras_dist.training.rows import gather_loss

# Losses of Keras that are one number for the whole batch, whatever their reduction.
_OVER_BATCH = {"dice", "tversky", "circle"}

# Layers of Keras whose output for a row depends on that row alone, in any number of
# dimensions. Not `MelSpectrogram` (a maximum over the batch), `Equalization` (and what
# contains it), `RandomElasticTransform` (the first row alone), `MixUp`, `CutMix`, what
# pads texts to the longest one, what may encode a batch of single values as one row,
# and what runs code of other packages.
_NAMES = (
    "Activation ActivityRegularization AdaptiveAveragePooling AdaptiveMaxPooling Add "
    "AdditiveAttention AlphaDropout Attention AutoContrast Average AveragePooling "
    "BatchNormalization Bidirectional CenterCrop Concatenate "
    "ContrastLimitedAdaptiveHistogramEqualization Conv ConvLSTM ConvLSTMCell "
    "ConvTranspose Cropping Dense DepthwiseConv Dot Dropout ELU EinsumDense Embedding "
    "Flatten Functional GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling "
    "GlobalMaxPooling GroupNormalization GroupedQueryAttention Identity InputLayer "
    "LSTM LSTMCell LayerNormalization LeakyReLU Masking MaxNumBoundingBoxes MaxPooling "
    "Maximum Minimum MultiHeadAttention Multiply Normalization PReLU Permute Pipeline "
    "RMSNormalization RNN RandomBrightness RandomColorDegeneration RandomColorJitter "
    "RandomContrast RandomCrop RandomErasing RandomFlip "
    "RandomGaussianBlur RandomGrayscale RandomHue RandomInvert RandomPerspective "
    "RandomPosterization RandomRotation RandomSaturation RandomSharpness RandomShear "
    "RandomTranslation RandomZoom ReLU RepeatVector Rescaling Reshape Resizing "
    "ReversibleEmbedding STFTSpectrogram SeparableConv Sequential SimpleRNN "
    "SimpleRNNCell Softmax Solarization SpatialDropout SpectralNormalization "
    "StackedRNNCells Subtract TimeDistributed UnitNormalization UpSampling ZeroPadding"
)
BY_ROW_LAYERS = set(_NAMES.split())

# Regularizers of Keras that add up a number for each row.
_BY_ROW_REGULARIZERS = {"L1", "L2", "L1L2"}

# Operations of a functional model that compute each row by itself.
_BY_ROW = {"Add", "Subtract", "Multiply", "Divide", "TrueDivide"}


def needs_no_trial(model: Any) -> bool:
    """Return True if Keras alone computes what a step differentiates and logs."""
    methods = ("call", "compute_loss", "compute_metrics", "train_step")
    layers = private.layers_of(model, include_self=False)
    compiled, _ = private.compiled_parts(model)
    losses = private.losses_in(compiled)
    return (
        all(is_keras_method(model, name) for name in methods)
        and (compiled is None or bool(losses))
        and all(map(is_by_row, layers))
        and all(map(_computes_by_row, [model, *layers]))
        and all(find_declared_kind(loss) is not None for loss in losses)
        and all(map(_is_keras_metric, stateful_metrics(model.metrics)))
    )


def explain_row_mixers(model: Any) -> str:
    """Return a sentence about layers of Keras that may mix rows of a batch, or ""."""
    layers = private.layers_of(model, include_self=False)
    found = [layer for layer in layers if type(layer).__module__.startswith("keras.")]
    names = ", ".join(layer.name for layer in found if not is_by_row(layer))
    return names and f"{names}: a row's output may depend on other rows of the batch. "


def is_by_row(layer: Any) -> bool:
    """Return True for a layer of Keras that computes each row by itself.

    It calls no function of the user's, as its activation, or its regularizer.
    """
    called = [layer, *filter(callable, vars(layer).values())]
    modules = [getattr(each, "__module__", None) or "" for each in called]
    regularizer = layer.activity_regularizer
    is_sum = type(regularizer).__name__ in _BY_ROW_REGULARIZERS
    axes = [getattr(layer, n, None) for n in ("axis", "axes", "attention_axes")]
    return (
        all(module.startswith("keras.") for module in modules)
        and re.sub("[123]D", "", type(layer).__name__) in BY_ROW_LAYERS
        and (regularizer is None or (is_sum and _divides_activity()))
        and not may_be_rows(axes)
    )


def may_be_rows(axes: Any) -> bool:
    """Return True if one of some axes is 0, or may be that, counted from the end."""
    known = [axis for axis in keras.tree.flatten(axes) if axis is not None]
    return any(axis < 1 and axis != -1 for axis in known)


def _computes_by_row(layer: Any) -> bool:
    """Return True unless a functional model has operations that may compare rows."""
    return all(
        isinstance(each, keras.layers.Layer) or type(each).__name__ in _BY_ROW
        for each in getattr(layer, "operations", ())
    )


def is_keras_method(owner: Any, name: str) -> bool:
    """Return True if a class of Keras defines a method of an object."""
    return mixin.find_owner(owner, name).__module__.startswith("keras.")


def find_declared_kind(loss: Any) -> str | None:
    """Return "reduction" for a loss of Keras that has a value for each row.

    Its `reduction` adds them up, or averages them. "batch" for one that is one number
    for all rows, and `None` for a loss of the user's, or over an axis of rows.
    """
    function, (_, axis) = getattr(loss, "fn", None), private.function_and_axis(loss)
    modules = [type(loss).__module__, getattr(function, "__module__", "keras.")]
    if not all(module.startswith("keras.") for module in modules):
        return None
    if loss.reduction in (None, "none"):
        return None
    if getattr(function, "__name__", "") in _OVER_BATCH:
        return "batch"
    return None if may_be_rows(axis) else "reduction"


def split_step(
    model: Any, step: Callable[[Any], Any], kinds: step_context.LossKinds
) -> Callable[[Any], Any]:
    """Return a step whose losses and logs are this rank's parts of the global batch."""
    methods = ("train_step", "compute_metrics")
    is_logged = not all(is_keras_method(model, name) for name in methods)

    def run(data: Any) -> Any:
        compiled, _ = private.compiled_parts(model)
        context = replace(step_context.current(), kinds=kinds, passed={})
        with contextlib.ExitStack() as stack:
            stack.enter_context(step_context.enter(context))
            for metric in stateful_metrics(model.metrics):
                if isinstance(metric, keras.metrics.Mean):
                    stack.enter_context(mixin.use(metric, PartOfMean))
            if compiled is not None:
                stack.enter_context(mixin.use(compiled, AddsParts))
                stack.callback(_remove_from_losses, compiled)
                for loss in private.losses_in(compiled):
                    mixin.add(loss, PartOfLoss)
            logs = step(data)
            if is_logged and context.trial is not None:
                for path, value in keras.tree.flatten_with_path(logs):
                    is_integer = tf.is_tensor(value) and value.dtype.is_integer
                    if is_number(tf.cast(value, tf.float64) if is_integer else value):
                        context.trial.note(("log", path), value)
            return logs

    return run


def weigh(level: str, value: Any) -> Any:
    """Multiply a number so that the average over ranks is that of the global batch.

    Args:
        level: What it is: see `step_context.StepPlace`.
        value: A scalar tensor; anything else is returned as it is.
    """
    context = step_context.current()
    if context.rows is None or not is_number(value):
        return value
    place = context.next_place(level)
    if context.trial is not None:
        context.trial.note(place, value)
    return _multiply(place, value)


def _multiply(place: step_context.StepPlace, value: Any) -> Any:
    """Return a number, / fᵣ if it was found to be a sum."""
    context = step_context.current()
    is_sum = place in context.kinds.sums
    return value * context.inverse_fraction(value.dtype) if is_sum else value


def is_number(value: Any) -> bool:
    """Return True for a scalar tensor of a floating dtype."""
    return (
        isinstance(value, tf.Tensor)
        and value.shape.rank == 0
        and value.dtype.is_floating
    )


class AddsParts:
    """Mixin for Keras's container of the losses of `compile`."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)  # type: ignore[misc]
        for loss in private.losses_in(self):
            mixin.add(loss, PartOfLoss)


class PartOfLoss:
    """Mixin for one loss of `compile`: this rank's part of that of all rows."""

    _values_mask: Any

    def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        context, kind = step_context.current(), find_declared_kind(self)
        call = super().__call__  # type: ignore[misc]
        rows = {"y_true": y_true, "y_pred": y_pred, "sample_weight": sample_weight}

        def plain(rows: Any) -> Any:
            return call(rows["y_true"], rows["y_pred"], rows["sample_weight"])

        def compute_whole(rows: Any) -> Any:
            # Of the rows of all ranks, `weighted_mean` is the plain mean.
            with step_context.enter(replace(context, rows=None)):
                return plain(rows)

        def part() -> Any:
            value = plain(rows)
            masks = [private.mask_of(y_pred), self.__dict__.pop("_values_mask", None)]
            if kind is not None and self.reduction == "sum":
                return value * context.inverse_fraction(value.dtype)
            return value * _part(self.reduction, masks, sample_weight, value.dtype)

        if context.rows is None:
            return plain(rows)
        if kind == "reduction":
            return part()
        if kind == "batch":
            value = gather_loss(compute_whole, rows)
            return plain(rows) if value is None else value
        place = context.next_place("loss")
        return _choose(place, part, lambda: gather_loss(compute_whole, rows))

    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        values = super().call(y_true, y_pred)  # type: ignore[misc]
        # Of targets that the loss ignores.
        object.__setattr__(self, "_values_mask", private.mask_of(values))
        return values


class PartOfMean(keras.metrics.Mean):
    """Mixin for a `keras.metrics.Mean` that a step may update with one number.

    One process counts each number as one. The ranks together count it as their
    number, each in proportion to its rows: so steps weigh the same.
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        context = step_context.current()
        weight, is_one = context.weight_of_all, getattr(values, "shape", ()) == ()
        has_axes = getattr(sample_weight, "shape", ()) != ()
        if context.rows is not None and is_one and not has_axes:
            values = weigh("tracker", values)
            if sample_weight is None:
                sample_weight = context.row_fraction(tf.float64) * comm.size()
        if weight is None:
            return super().update_state(values, sample_weight)
        if isinstance(weight, float):
            return None
        if sample_weight is None:
            values = tf.identity(values)  # without a mask, which Keras ignores here
            sample_weight = comm.size() if is_one else tf.ones_like(values)
        weight = tf.cast(sample_weight, self.dtype) * tf.cast(weight, self.dtype)
        return super().update_state(values, weight)


def compute_part(plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return this rank's part of what a `compute_loss` of the user's returns.

    If that is neither a mean nor a sum of its rows, it is computed from all rows, if
    they are few.

    Args:
        plain: The user's `compute_loss`.
        args, kwargs: What it is called with.
    """
    context, names = step_context.current(), ("x", "y", "y_pred", "sample_weight")
    if context.rows is None:
        return plain(*args, **kwargs)
    place = context.next_place("compute")
    positional = dict(zip(names, args, strict=False))
    rows = positional | {name: kwargs[name] for name in names if name in kwargs}

    is_gathered, first = place in context.kinds.gathered, 1000 * (place[1] + 1)

    def start_at(place: int) -> None:
        context.passed.update(loss=place, tracker=place)

    def compute(rows: dict[str, Any]) -> Any:
        leading = [rows[name] for name in positional]
        others = {name: rows.get(name, value) for name, value in kwargs.items()}
        start_at(first)  # if it is computed twice, its losses have the same places
        return plain(*leading, *args[len(positional) :], **others)

    def compute_own() -> Any:
        # A trial computes both, and one of them counts in means that it updates.
        ignored = 0.0 if is_gathered and context.trial is not None else None
        with step_context.enter(replace(context, weight_of_all=ignored)):
            return compute(rows)

    def compute_all(rows: dict[str, Any]) -> Any:
        weight = context.row_fraction(tf.float64) if is_gathered else 0.0
        with step_context.enter(replace(context, rows=None, weight_of_all=weight)):
            return compute(rows)

    found = _choose(place, compute_own, lambda: gather_loss(compute_all, rows))
    start_at(first + 500)
    return found


def _choose(
    place: step_context.StepPlace, plain: Callable[[], Any], gathered: Callable[[], Any]
) -> Any:
    """Return this rank's part of a loss that does not say what it is.

    `gathered` computes it from the rows of all ranks; it returns `None` if it cannot.
    """
    context = step_context.current()
    value, is_gathered = None, place in context.kinds.gathered
    if context.trial is not None:
        every, value = context.trial.gather_loss(place, gathered), plain()
        if is_number(value):
            context.trial.note(place, value)
        return every if is_gathered else _multiply(place, value)
    if is_gathered:
        value = gathered()
    return _multiply(place, plain()) if value is None else value


def _part(reduction: str, masks: list[Any], sample_weight: Any, dtype: Any) -> Any:
    """Return the factor of a mean of which a mask or weights change the divisor."""
    known = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    divisor = None
    if known:
        divisor = tf.cast(functools.reduce(tf.logical_and, known), tf.float64)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weights = tf.cast(sample_weight, tf.float64)
        if divisor is not None:
            is_alike = weights.shape.rank == divisor.shape.rank
            weights *= divisor if is_alike else tf.reshape(divisor, tf.shape(weights))
        divisor = weights
    is_mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    if divisor is None or not is_mean:
        return 1
    context = step_context.current()
    own = context.count_own(tf.reduce_sum(divisor))
    part = tf.math.divide_no_nan(own, context.total(own, purpose="divisors"))
    fraction = context.row_fraction(tf.float64)
    return tf.cast(tf.math.divide_no_nan(part, fraction), dtype)


def _remove_from_losses(compiled: Any) -> None:
    for loss in private.losses_in(compiled):
        mixin.remove(loss, PartOfLoss)
        loss.__dict__.pop("_values_mask", None)


def _is_keras_metric(metric: Any) -> bool:
    """Return True for a metric of Keras that has a value for each row."""
    function, axis = private.function_and_axis(metric)
    modules = [type(metric).__module__, getattr(function, "__module__", "keras.")]
    return (
        all(module.startswith("keras.") for module in modules)
        and not isinstance(function, keras.losses.Loss)
        and getattr(function, "__name__", "") not in _OVER_BATCH
        and axis in (-1, 1)
    )


@functools.cache
def _divides_activity() -> bool:
    """Return True if Keras divides activity regularizers by rows: from 3.14 on."""
    layer = keras.layers.ActivityRegularization(l1=1.0)
    layer(tf.ones((2, 1)))
    return float(layer.losses[0]) < 1.5
