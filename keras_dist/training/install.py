"""Change Keras for the time of a fit; each change has its undoing beside it.

- the class of the model: `DistributedStep`
- its train and test functions: `TracedFunctions`
- the class of each optimizer: `ReducesGradients` at the outermost, `ScalesRate` at the
  innermost
- the class of `BatchNormalization(synchronized=True)`: `GlobalMoments`

While a step is traced, or runs eagerly, methods of classes are replaced, too
(`mixin.replace_method`). All of it is undone when the fit is over.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import comm, mixin, private
from keras_dist.allocator import keep_freed_memory
from keras_dist.data.feed import Feed
from keras_dist.data.pipeline import as_untuned
from keras_dist.optimizer.attach import attach_to, averaging_of
from keras_dist.optimizer.nested import nested_optimizers, optimizers_of
from keras_dist.optimizer.rate import scale_rate, unscale_rate
from keras_dist.training import saving
from keras_dist.training.session import Session, TracedFunctions, session_of
from keras_dist.training.step import DistributedStep


def install(model: Any) -> Session:
    """Make `model` train on all ranks; a second call returns the same session."""
    if mixin.has(model, DistributedStep):
        session_of(model).end_leftover(model)
    if not mixin.has(model, DistributedStep):
        private.check_hooks(type(model))
        keep_freed_memory()
        saving.begin_interval()
        traced = model.__dict__.get("_traced_functions") or TracedFunctions()
        # Keras does not track attributes that are set so; it would save them.
        object.__setattr__(model, "_traced_functions", traced)
        object.__setattr__(model, "_distributed_session", Session(traced))
        mixin.add(model, DistributedStep)
        traced.enter(model)
        session_of(model).undo.callback(_restore, model)
    session = session_of(model)
    session.has_fit |= private.is_in_fit(model)
    return session


def _restore(model: Any) -> None:
    """Undo `install`."""
    session = session_of(model)
    saving.begin_interval()
    stopped = model.stop_training
    mixin.remove(model, DistributedStep)
    model.stop_training = stopped
    session.traced.leave(model, session.options)
    session.on_compile.clear()


def uninstall(model: Any, *, is_over: bool = False) -> None:
    """Make `model` a plain Keras model again, unless `dist_fit` is still running.

    Args:
        model: A model on which `install` was called.
        is_over: Whether a `dist_fit` or an evaluation on all ranks is over, so that
            nobody reads the session any more. Callbacks may, after the first of them
            has called this.
    """
    if not mixin.has(model, DistributedStep):
        return
    session = session_of(model)
    if is_over or not session.is_held:
        session.undo.close()
        if is_over:
            object.__delattr__(model, "_distributed_session")


class FitCallback(keras.callbacks.Callback):
    """Makes its model train on all ranks until the fit is over."""

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        install(model)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        uninstall(self.model)


@contextlib.contextmanager
def train_on_all(
    model: Any,
    training: Feed,
    validation: Feed | None,
    *,
    rates: tuple[float, int, int],
    is_resumed: bool,
) -> Iterator[Session]:
    """Context manager in which `model` trains on all ranks.

    Args:
        model: A compiled model.
        training, validation: This rank's data.
        rates: The full factor on learning rates, the steps until then, and the steps
            of one process that one step stands for in schedules.
        is_resumed: Whether the fit may continue rates and accumulated gradients.
    """

    def average() -> None:
        # The outermost first, which takes the averaging from those inside it.
        found = sorted(optimizers_of(model), key=lambda o: -len(nested_optimizers(o)))
        for each in found:
            if comm.size() > 1:
                session.undo.enter_context(attach_to(each))
            session.undo.callback(unscale_rate, each)  # a resume scales it, too

    session = install(model)
    try:
        session.is_held = True
        session.use(training, validation)
        average()
        # A train step may make an optimizer when it is first traced.
        session.call_at_start(average)
        session.on_compile.append(average)
        scale_rates(model, *rates)
        if not is_resumed:
            _reuse_train_function(model, rates)
        yield session
    except BaseException:
        session.options = None  # a step that has failed is traced again
        raise
    finally:
        uninstall(model, is_over=True)


def scale_rates(
    model: Any, full: float, warmup_steps: int, step_multiplier: int = 1
) -> None:
    """Scale the rates of all optimizers of `model`, from its first step until its end.

    Args:
        model: A model on which `install` was called.
        full, warmup_steps, step_multiplier: See `scale_rate`.
    """
    session = session_of(model)

    def scale() -> None:
        for each in optimizers_of(model):
            scale_rate(each, full, warmup_steps, step_multiplier)
            session.undo.callback(unscale_rate, each)

    if full != 1.0 or step_multiplier > 1:
        # A MultiOptimizer may have no inner optimizers before it is built.
        session.call_at_start(scale)
        session.on_compile.append(scale)


def turn_off_tuning(model: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager in which a model reads data without TensorFlow's tuning thread.

    The thread sleeps longer each time, up to a minute. At the end of a pass TensorFlow
    wakes it before the stop flag is set (`CancellationManager::StartCancelWithStatus`),
    so that it may sleep again while the pass waits for it: on a rank with one core,
    nearly always. Without it, stages that use `tf.data.AUTOTUNE` keep their initial
    parallelism. A data set whose options turn tuning on or off is not changed.
    """
    if comm.size() == 1:
        return contextlib.nullcontext()

    def read(plain: Any, strategy: Any, dataset: Any, options: Any = None) -> Any:
        return plain(as_untuned(dataset), options)

    strategy = type(model.distribute_strategy)
    return mixin.replace_method(strategy, "experimental_distribute_dataset", read)


@contextlib.contextmanager
def evaluate_on_all(model: Any, feed: Feed) -> Iterator[None]:
    """Context manager in which `model.evaluate` returns the metrics of all ranks.

    The model may be in the middle of a fit.
    """
    before = vars(model).get("_distributed_session")
    session = install(model)
    try:
        on_all = {"averages": True, "evaluation": None, "next_evaluation": feed}
        with mixin.change(session, **on_all):
            yield
    finally:
        if session is not before:
            uninstall(model, is_over=True)


def _reuse_train_function(model: Any, rates: tuple[float, int, int]) -> None:
    """Use the train function of the last fit, if all ranks can. A collective."""
    session = session_of(model)
    session.options = (
        rates,
        optimizers_of(model),
        averaging_of(model),
        session.may_read_on,
        session.feed.class_weight,
    )
    function = session.traced.find_train_function(session.options)
    session.is_traced = all(comm.gather(function is not None))
    if session.is_traced:
        model.train_function = function
