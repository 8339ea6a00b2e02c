"""Change Keras for the time of a fit; each change has its undoing beside it.

- the class of the model: `DistributedStep`
- its train and test functions: `TracedFunctions`
- the class of each optimizer: `ReducesGradients` at the outermost, `ScalesRate` at the
  innermost
- the class of `BatchNormalization(synchronized=True)`: `GlobalMoments`

While a step is traced, or runs eagerly, methods of classes are replaced, too
(`mixin.replace_method`). All of it is undone when `open_fit` ends.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_dist import comm, mixin, private
from keras_dist.allocator import keep_freed_memory
from keras_dist.data.feed import Feed
from keras_dist.data.pipeline import as_untuned
from keras_dist.optimizer.attach import attach_to, averaging_of
from keras_dist.optimizer.nested import nested_optimizers, optimizers_of
from keras_dist.optimizer.rate import scale_rate
from keras_dist.training import saving
from keras_dist.training.session import Session, TracedFunctions, session_of
from keras_dist.training.step import DistributedStep


@contextlib.contextmanager
def open_fit(model: Any) -> Iterator[Session]:
    """Context manager in which `model` trains on all ranks: each way to train opens it.

    A fit in a callback has a session of its own, and leaves the one around it as it
    was.
    """
    outer = vars(model).get("_distributed_session")
    private.check_hooks(type(model))
    keep_freed_memory()
    saving.begin_interval()
    traced = TracedFunctions()
    if outer is None:
        traced = vars(model).get("_traced_functions", traced)
        # Keras does not track attributes that are set so; it would save them.
        object.__setattr__(model, "_traced_functions", traced)
    session = Session(traced)
    # The step of the last fit, which the next one may use, is traced with `_averaging`.
    kept = ("_rate",) if outer is None else ("_rate", "_averaging")

    def keep_optimizers() -> None:
        for outermost in optimizers_of(model):
            for part in nested_optimizers(outermost):
                session.undo.enter_context(mixin.preserve(part, *kept))

    object.__setattr__(model, "_distributed_session", session)
    mixin.add(model, DistributedStep)
    traced.enter(model)
    try:
        with session.undo:
            keep_optimizers()
            # A train step may make an optimizer when it is first traced.
            session.call_at_start(keep_optimizers)
            session.on_compile.append(keep_optimizers)
            yield session
    except BaseException:
        session.options = None  # a step that has failed is traced again
        raise
    finally:
        saving.begin_interval()
        stopped = model.stop_training
        traced.leave(model, session.options)
        object.__setattr__(model, "_distributed_session", outer)
        if outer is None:
            mixin.remove(model, DistributedStep)
            object.__delattr__(model, "_distributed_session")
        model.stop_training = stopped


def start_training(
    model: Any,
    training: Feed,
    validation: Feed | None,
    *,
    rates: tuple[float, int, int],
    is_resumed: bool,
) -> None:
    """Let a model on which a fit is open train as `dist_fit` is asked to.

    Args:
        model: A compiled model.
        training, validation: This rank's data.
        rates: The full factor on learning rates, the steps until then, and the steps
            of one process that one step stands for in schedules.
        is_resumed: Whether the fit may continue rates and accumulated gradients.
    """
    session = session_of(model)

    def average() -> None:
        # The outermost first, which takes the averaging from those inside it.
        found = sorted(optimizers_of(model), key=lambda o: -len(nested_optimizers(o)))
        for each in found if comm.size() > 1 else ():
            attach_to(each)

    session.feed, session.validation = training, validation or session.validation
    average()
    session.call_at_start(average)
    session.on_compile.append(average)
    scale_rates(model, *rates)
    if not is_resumed:
        _reuse_train_function(model, rates)


def scale_rates(
    model: Any, full: float, warmup_steps: int, step_multiplier: int = 1
) -> None:
    """Scale the rates of all optimizers of `model`, from its first step until its end.

    Args:
        model: A model on which a fit is open.
        full, warmup_steps, step_multiplier: See `scale_rate`.
    """

    def scale() -> None:
        for each in optimizers_of(model):
            scale_rate(each, full, warmup_steps, step_multiplier)

    if full != 1.0 or step_multiplier > 1:
        # A MultiOptimizer may have no inner optimizers before it is built.
        session_of(model).call_at_start(scale)
        session_of(model).on_compile.append(scale)


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
    is_open = mixin.has(model, DistributedStep)
    with contextlib.nullcontext() if is_open else open_fit(model):
        on_all = {"averages": True, "evaluation": None, "next_evaluation": feed}
        with mixin.change(session_of(model), **on_all):
            yield


def _reuse_train_function(model: Any, rates: tuple[float, int, int]) -> None:
    """Use the train function of the last fit, if all ranks can. A collective."""
    session = session_of(model)
    session.options = (
        rates,
        optimizers_of(model),
        averaging_of(model),
        session.knows_rows,
        session.may_read_on,
        session.feed.is_marked,
        session.feed.is_strided,
        session.feed.class_weight,
    )
    function = session.traced.find_train_function(session.options)
    session.is_traced = all(comm.gather(function is not None))
    if session.is_traced:
        model.train_function = function
