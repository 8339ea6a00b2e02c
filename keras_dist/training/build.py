"""Build the model, its metrics and its optimizers before the first step."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, mixin, private
from keras_dist.data.draws import preserve_generators
from keras_dist.data.pipeline import as_untuned
from keras_dist.lines import warn
from keras_dist.optimizer import step_context
from keras_dist.optimizer.attach import attach_to
from keras_dist.optimizer.nested import (
    build_optimizer,
    nested_optimizers,
    optimizers_of,
)
from keras_dist.optimizer.rate import scale_rate
from keras_dist.training import batch_norm
from keras_dist.training.remember import list_variables, preserve_variables
from keras_dist.training.session import FitDecisions, session_of


def build(model: Any, run: Callable[[Any], Any], data: Any, *, is_eager: bool) -> None:
    """Make all variables of the model, its metrics and its optimizers.

    They must exist before the first step: weights and optimizer state are copied to all
    ranks then, and code that XLA compiles cannot make variables.

    Keras builds a model by calling it on the batch. A train step of the user's may call
    it, or layers of it, on something else, and would find weights of other shapes. So
    such a step is traced instead; or run, if it runs without a graph and reads values.
    In the graph of a step, if there is one: outside of it no tape records a gradient.

    Raises:
        Exception: What the user's train step raises, if it had to be run once.
    """
    if _is_complete(model):
        return
    function = getattr(run, "__func__", run)
    is_of_keras = getattr(function, "__module__", "").startswith("keras.")
    unbuilt = _count_unbuilt(model)
    methods = [_trace, _build_by_keras]
    if is_of_keras or (is_eager and not unbuilt):
        methods.reverse()  # runs no Python of the user's step
    if is_eager:
        methods.append(_run_once)  # it may read values
    errors = []
    for method in methods:
        if method is _build_by_keras and is_eager and _count_unbuilt(model) < unbuilt:
            continue  # what is left is not built by calling the model, either
        try:
            method(model, run, data)
        except Exception as error:
            if method is _run_once:
                raise
            errors.append(error)
            if _count_unbuilt(model):
                continue
        break
    else:
        warn(
            f"{type(model).__name__} could not be built before its first step "
            f"({type(errors[0]).__name__}: {errors[0]}). Build it before the fit, for "
            "example by calling it on one batch."
        )
    _build_optimizer(model)


def build_early(model: Any, spec: Any) -> None:
    """Build a model that Keras's own step trains, before a batch was read, if possible.

    The structure of a batch is `spec`, of `tf.TensorSpec`; `None` if unknown.
    """
    if spec is not None and not _is_complete(model):
        with contextlib.suppress(Exception):  # the first step raises it again
            _build_by_keras(model, None, spec)
    if not _count_unbuilt(model):
        _build_optimizer(model)


def _count_unbuilt(model: Any) -> int:
    """Count the layers that are not built and hold no weight.

    A model of which a train step only calls the layers has weights, and is never built.
    """
    layers = private.layers_of(model)
    return sum(not layer.built and not layer.weights for layer in layers)


def _is_complete(model: Any) -> bool:
    """Return True if layers, losses, metrics and optimizers have their variables."""
    compiled = [part for part in private.compiled_parts(model) if part is not None]
    found = [*model.metrics, *compiled, *optimizers_of(model)]
    is_built = all(getattr(each, "built", True) for each in found)
    return is_built and not _count_unbuilt(model)


def _build_by_keras(model: Any, _: Any, data: Any) -> None:
    with tf.init_scope(), step_context.enter(step_context.StepContext()):
        private.build_by_keras(model, data)


def _build_optimizer(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built:
        with tf.init_scope():
            build_optimizer(optimizer, model.trainable_variables)


def _trace(model: Any, run: Callable[[Any], Any], data: Any) -> None:
    """Trace the step in a graph that is thrown away."""
    leaves = keras.tree.flatten(data)
    is_traced = False

    def trace(tensors: list[Any]) -> None:
        nonlocal is_traced
        if is_traced:
            return  # TensorFlow traces again if it had to lift a variable
        is_traced = True
        rest = iter(tensors)
        batch = [None if leaf is None else next(rest) for leaf in leaves]
        with tf.variable_creator_scope(_made_now):
            run(keras.tree.pack_sequence_as(data, batch))

    specs = [tf.type_spec_from_value(leaf) for leaf in leaves if leaf is not None]
    # Gradients are averaged in the step itself, not here.
    context = step_context.StepContext(is_averaged=True)
    try:
        with (
            preserve_generators(),
            step_context.enter(context),
            step_context.run_inline(),
        ):
            tf.function(trace, autograph=False).get_concrete_function(specs)
    finally:
        private.clear_losses(model)  # of this graph


def _made_now(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Make a variable outside of the graph, unless its first value depends on that."""
    value = kwargs.get("initial_value")
    if not callable(value):
        is_of_graph = tf.is_tensor(value) and not isinstance(
            value, tf.__internal__.EagerTensor
        )
        known = tf.get_static_value(value) if is_of_graph else value
        if known is None:
            return next_creator(**kwargs)
        kwargs["initial_value"] = known
    kwargs["experimental_enable_variable_lifting"] = False
    with tf.init_scope():
        return next_creator(**kwargs)


def _run_once(model: Any, run: Callable[[Any], Any], data: Any) -> None:
    """Run the step on its batch, and take back what it did to variables."""
    context = step_context.StepContext(is_averaged=True)
    with (
        preserve_generators(),
        step_context.enter(context),
        preserve_variables(list_variables(model)),
    ):
        run(data)
        for metric in model.metrics:  # also those that were given to `compile`
            metric.reset_state()


def start(
    model: Any,
    data: Any = None,
    own_step: Callable[[Any], Any] | None = None,
    *,
    is_eager: bool = True,
) -> None:
    """Call the hooks, before the first step of `model` or as it is traced.

    After a `compile` in a callback it builds what that has made.

    Args:
        model: A model in a fit.
        data, own_step: A batch, and the step, to build the model; `None` if it is.
        is_eager: Whether steps run without a graph.
    """
    session = session_of(model)
    is_first, session.has_started = not session.has_started, True
    # TensorFlow would trace a step once more in which variables were made.
    with (
        step_context.enter(step_context.StepContext()),
        tf.variable_creator_scope(_made_now),
    ):
        # An eager step makes what is new by itself.
        if own_step is not None and (is_first or not is_eager):
            build(model, own_step, data, is_eager=is_eager)
        # Outside of the graph that is being traced, so that this runs once, now.
        with tf.init_scope():
            prepare_optimizers(model)
            batch_norm.synchronize(model, session.decided.batch_norm, session.undo)
            with session.traced.record_reset(model):
                pass  # the build has made metrics
            if is_first and session.hooks:
                session.hooks.start()
            if comm.size() > 1:
                session.traced.noise.prepare(model, session.undo)


def prepare_optimizers(model: Any) -> None:
    """Let the optimizers of a model in a fit average, at scaled rates, until its end.

    A train step may make one when it is first traced, a callback by `compile`, and a
    `MultiOptimizer` its inner ones when it is built.
    """
    session = session_of(model)
    # The step of the last fit, which the next one may use, is traced with `_averaging`.
    kept = ("_rate",) if session.outer is None else ("_rate", "_averaging")
    # The outermost first, which takes the averaging from those inside it.
    found = sorted(optimizers_of(model), key=lambda o: -len(nested_optimizers(o)))
    for outermost in found:
        for part in nested_optimizers(outermost):
            session.undo.enter_context(mixin.preserve(part, *kept))
        if session.decided.attaches:
            attach_to(outermost)
        if session.decided.rates != FitDecisions().rates:
            scale_rate(outermost, *session.decided.rates)


def read_first(iterator: Any, count: int) -> tuple[list[Any], Callable[[], Any]]:
    """Read the first batches as numbers, and return what makes an iterator with them.

    Keras's loop gives the train function an iterator, which it reads inside of a graph.

    Args:
        iterator: The iterator.
        count: How many batches to read: as many as one call reads.
    """
    batches = list(itertools.islice(iterator, count))
    # What Keras's adapters have in place of `None` in a data set is an `Optional`.
    found = keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf,
        batches,
    )
    return found, lambda: _prepend(batches, iterator) if batches else iterator


def _prepend(batches: list[Any], iterator: Any) -> Any:
    """Return an iterator with the batches for one call, of the same kind."""
    if not isinstance(iterator, tf.data.Iterator):
        return itertools.chain(batches, iterator)
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    # With the lengths that the data's own spec leaves open: else the step was traced
    # once more.
    variant = tf.data.experimental.to_variant(dataset)
    dataset = tf.data.experimental.from_variant(variant, iterator.element_spec)
    return iter(as_untuned(dataset))
