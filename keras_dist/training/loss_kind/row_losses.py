"""The losses of one train step, each made its part of that of the global batch."""

import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, private
from keras_dist.optimizer import step_context, times
from keras_dist.training.loss_kind.probe import Kind, Probe, RowGraph, rows_fixed_in
from keras_dist.training.loss_kind.terms import (
    EagerLog,
    Term,
    Undecided,
    of_all_ranks,
    terms_of,
)

# Losses of Keras that are one number for the whole batch, whatever its reduction.
_OF_WHOLE_BATCH = (keras.losses.Dice, keras.losses.Tversky)


def is_mean_of_keras(loss: Any) -> bool:
    """Tell whether a loss is Keras's own, with a value for each row.

    Args:
        loss: A `keras.losses.Loss`, a name or a function, as `compile` takes it.
    """
    of = getattr(loss, "fn", loss)
    owner = of if isinstance(of, type) or hasattr(of, "__name__") else type(of)
    is_keras = isinstance(loss, str) or owner.__module__.startswith("keras.")
    return is_keras and not isinstance(loss, _OF_WHOLE_BATCH)


def is_all_of_keras(model: Any, ours: type) -> bool:
    """Tell whether Keras's code alone computes the losses of a model and its layers.

    Args:
        model: A compiled model.
        ours: The mixin of this package, whose methods are ignored.
    """
    methods = ("call", "compute_loss", "train_step")
    return (
        all(definer(model, name, ours).startswith("keras.") for name in methods)
        and all(
            type(layer).__module__.startswith("keras.")
            # Up to Keras 3.13 its number is a sum over rows, from 3.14 on a mean.
            and layer.activity_regularizer is None
            for layer in private.layers_of(model, include_self=False)
        )
        and all(map(is_mean_of_keras, keras.tree.flatten(getattr(model, "loss", None))))
    )


def is_keras_path_to_update(model: Any, ours: type) -> bool:
    """Tell whether Keras's own code alone computes the update from the loss.

    Args:
        model: A compiled model.
        ours: The mixin of this package, whose methods are ignored.
    """
    return all(
        definer(found, name, ours).startswith("keras.")
        for found, name in ((model, "train_step"), (model.optimizer, "apply_gradients"))
    )


def definer(found: Any, name: str, ours: type) -> str:
    """Return the module of the class that defines a method."""
    for cls in type(found).__mro__:
        if name in vars(cls) and cls is not ours:
            return cls.__module__
    return ""


class RowLosses:
    """The losses of one train step.

    Args:
        model: The model that is trained.
        log: What was read in the graph of the step, for one that runs eagerly.
    """

    def __init__(self, model: Any, log: EagerLog) -> None:
        self._variables = model.trainable_variables
        self._log = log
        layers = private.layers_of(model)
        self._is_narrow = any(layer.compute_dtype == "float16" for layer in layers)
        self._fractions: dict[Any, Any] = {}
        self._probes: dict[Any, Probe] = {}

    def call(
        self,
        plain: Any,
        loss: Any,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Any:
        """`keras.losses.Loss.__call__`."""
        if step_context.current().rows is None:
            return plain(y_true, y_pred, sample_weight)
        sample_weight, is_decided = self._weight_of_all(sample_weight)
        value = plain(y_true, y_pred, sample_weight)
        if value.shape.rank != 0:
            return value
        if not is_decided:
            return step_context.make_known(value, "mean")
        mask = private.mask_of(y_pred)
        divisor = _divisor(loss.reduction, mask, sample_weight)
        if divisor is not None:
            term = Term(value, divisor=divisor)
            value = self._sum([term], value)
        elif not is_mean_of_keras(loss):
            value = self.of_all(value)
        elif loss.reduction == "sum":
            value = self._sum([Term(value)], value)
        return step_context.make_known(value, "mean")

    def additional(self, plain: Any, model: Any, loss: Any) -> Any:
        """`keras.Model._aggregate_additional_loss`: one of `add_loss`."""
        return step_context.make_known(self.of_all(plain(loss)), "mean")

    def gradient(
        self,
        plain: Any,
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        **kwargs: Any,
    ) -> Any:
        """`tf.GradientTape.gradient`."""
        variables = [
            source
            for source in tf.nest.flatten(sources)
            if isinstance(source, (tf.Variable, keras.Variable))
        ]
        targets = tf.nest.flatten(target)
        given = tf.nest.flatten(output_gradients)
        if len(given) != len(targets):
            given = [None] * len(targets)
        if not variables or step_context.current().rows is None:
            return plain(target, sources, output_gradients, **kwargs)
        if len(targets) == 1 and self._is_narrow_sum(targets[0], given[0], variables):
            found = plain(target, sources, output_gradients, **kwargs)
            return tf.nest.map_structure(self._of_sum, found)
        weighted: list[tuple[Any, Any]] = []
        for tensor, factor in zip(targets, given, strict=True):
            weighted += self._weighted_targets(tensor, factor, variables)
        if len(weighted) == len(given) and all(
            factor is before
            for (_, factor), before in zip(weighted, given, strict=True)
        ):
            return plain(target, sources, output_gradients, **kwargs)
        weighted = [(t, tf.ones_like(t) if g is None else g) for t, g in weighted]
        return plain(
            [t for t, _ in weighted], sources, [g for _, g in weighted], **kwargs
        )

    def update_state(
        self, plain: Any, metric: Any, values: Any, sample_weight: Any = None
    ) -> Any:
        """`keras.metrics.Mean.update_state`.

        One process counts each number as one. The ranks together count it as their
        number, each in proportion to its rows: so steps weigh the same.
        """
        if _rank_of(sample_weight) == 0:
            is_number = _rank_of(values) == 0
            values = self.of_all(values, is_loss=False)
            if sample_weight is None and is_number:
                sample_weight = self._fraction() * comm.size()
        return plain(values, sample_weight)

    def of_all(self, value: Any, *, is_loss: bool = True) -> Any:
        """A number of this rank's rows, such that the mean over ranks is that of all.

        Args:
            value: A scalar tensor; anything else is returned as it is.
            is_loss: Whether weights are updated by it, and a doubt is worth a warning.
        """
        is_number = isinstance(value, tf.Tensor) and value.shape.rank == 0
        if not is_number or not value.dtype.is_floating:
            return value
        return self._sum(self._terms(value, is_loss=is_loss), value)

    def of_all_logged(self, value: Any) -> Any:
        """Do the same for a value that a train step returns to be logged."""
        return self.of_all(value, is_loss=False)

    def _weight_of_all(self, weight: Any) -> tuple[Any, bool]:
        """Weights divided by a sum over this rank's rows, by that of all ranks instead.

        An object detector divides so by the anchors that match in the batch.

        Returns:
            The weights, and whether it is known what they were divided by.
        """
        is_tensor = isinstance(weight, tf.Tensor) and weight.dtype.is_floating
        if not is_tensor or not weight.shape.rank:
            return weight, True
        try:
            if tf.executing_eagerly():
                self._log.check_weights()
                return weight, True
            total = of_all_ranks(self._fraction)
            probe = self._probe(weight.graph)
            found = probe.of_all(weight, total, self._variables)
            if found is not weight:
                self._log.add_divided_weights()
            return found, True
        except Undecided as error:
            self._log.add_divided_weights()
            self._tell(error)
            return weight, False

    def _weighted_targets(
        self, target: Any, factor: Any, variables: list[Any]
    ) -> list[tuple[Any, Any]]:
        """Find what to differentiate in place of one target, each with its factor."""
        if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
            return [(target, factor)]
        if target.shape.rank == 0:
            terms = self._terms(target, variables)
            own = 1.0 if factor is None else tf.cast(factor, tf.float64)
            changes = [
                (t.value, tf.cast(t.change(self._fraction()) * own, t.value.dtype))
                for t in terms
            ]
            return [(target, factor), *changes]
        ones = tf.ones_like(target) if factor is None else tf.cast(factor, target.dtype)
        terms = self._terms(tf.reduce_sum(target * ones), variables)
        for term in terms:
            change = 1 + term.change(self._fraction())
            ones = ones * tf.cast(change, target.dtype)
        return [(target, ones if terms else factor)]

    def _is_narrow_sum(self, target: Any, factor: Any, variables: list[Any]) -> bool:
        """Tell whether a target is a sum over rows in a model of float16.

        The loss scale nearly fills that dtype: × the number of ranks, it is inf there.
        """
        is_float = isinstance(target, tf.Tensor) and target.dtype.is_floating
        if not is_float or not self._is_narrow:
            return False
        value = tf.reduce_sum(target if factor is None else target * factor)
        terms = self._terms(value, variables)
        if tf.executing_eagerly() or not terms:
            return bool(terms)
        return self._probe(value.graph).kind_of(value) is Kind.SUM

    def _of_sum(self, gradient: Any) -> Any:
        """Turn the gradient of a sum over this rank's rows into that of a mean."""
        if gradient is None:
            return None
        factor = tf.math.divide_no_nan(tf.ones((), tf.float64), self._fraction())
        return times(gradient, tf.cast(factor, gradient.dtype))

    def _terms(
        self, value: Any, variables: Any = None, *, is_loss: bool = True
    ) -> list[Term]:
        """Return the terms of a scalar that are no means; warn if they are unknown."""
        try:
            if tf.executing_eagerly():
                return [Term(value)] if self._log.is_sum() else []
            probe = self._probe(value.graph)
            sources = variables if variables is not None else self._variables
            terms = terms_of(value, probe, sources=sources if is_loss else ())
            self._log.add(bool(terms), lambda: probe.kind_of(value) is Kind.SUM)
            return terms
        except Undecided as error:
            self._log.add_undecided(error)
            if is_loss:
                self._tell(error)
            return []

    def _tell(self, error: Undecided) -> None:
        """Warn that a loss is averaged, whatever it is."""
        # Keras may trace a step several times.
        if self._log.is_new(str(error)) and comm.rank() == 0:
            warnings.warn(
                "It cannot be seen from the graph of a loss whether it is a mean "
                f"or a sum over rows, {error}. The ranks average it, weighted by "
                "rows, as if it were a mean: the result may differ from that of "
                "one process. Compute the loss by rows, and end with a mean or a "
                "sum over them.",
                stacklevel=3,
            )

    def _probe(self, graph: Any) -> Probe:
        if graph not in self._probes:
            length = step_context.current().length or rows_fixed_in(graph)
            self._probes[graph] = Probe(RowGraph(length))
        return self._probes[graph]

    def _sum(self, terms: list[Term], value: Any) -> Any:
        for term in terms:
            change = term.change(self._fraction())
            value = value + tf.cast(term.value, value.dtype) * tf.cast(
                change, value.dtype
            )
        return value

    def _fraction(self) -> Any:
        """This rank's fraction of the rows, computed once in each graph."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph not in self._fractions:
            fraction = step_context.current().row_fraction(tf.float64)
            self._fractions[graph] = fraction
        return self._fractions[graph]


def _rank_of(value: Any) -> int | None:
    """Return the number of axes; 0 for a number and `None`; `None` if unknown."""
    shape = getattr(value, "shape", ())
    return shape.rank if isinstance(shape, tf.TensorShape) else len(shape)


def _divisor(reduction: Any, mask: Any, sample_weight: Any) -> Any:
    """Return what a reduction of Keras divides by; `None` if by rows."""
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, tf.float64))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = tf.cast(sample_weight, tf.float64)
        if mask is not None:
            weight *= tf.cast(tf.reshape(mask, tf.shape(weight)), tf.float64)
        return tf.reduce_sum(weight)
    return None
