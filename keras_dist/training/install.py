"""Change Keras for the time of a fit; each change has its undoing beside it.

- the class of the model: `DistributedStep`
- its train and test functions: `TracedFunctions`
- the class of each optimizer: `ReducesGradients` at the outermost, `ScalesRate` at the
  innermost
- the class of `BatchNormalization` layers: `GlobalMoments`

While a step is traced, or runs eagerly, methods of classes are replaced, too
(`mixin.replace_method`). All of it is undone when `open_fit` ends.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_dist import comm, mixin, private
from keras_dist.allocator import keep_freed_memory
from keras_dist.data.pipeline import as_untuned
from keras_dist.optimizer.attach import averaging_of
from keras_dist.optimizer.nested import optimizers_of
from keras_dist.training import saving
from keras_dist.training.build import prepare_optimizers
from keras_dist.training.session import (
    FitDecisions,
    Session,
    TracedFunctions,
    session_of,
    traced_functions_of,
)
from keras_dist.training.step import DistributedStep

_NOTHING = FitDecisions()


@contextlib.contextmanager
def open_fit(model: Any, decided: FitDecisions = _NOTHING) -> Iterator[Session]:
    """Context manager in which `model` trains on all ranks: each way to train opens it.

    A fit in a callback has a session of its own, and leaves the one around it as it
    was.

    Args:
        model: A compiled model.
        decided: What was decided for it; by default, nothing.
    """
    outer = vars(model).get("_distributed_session")
    private.check_hooks(type(model))
    keep_freed_memory()
    saving.begin_interval()
    traced = traced_functions_of(model) if outer is None else TracedFunctions()
    session = Session(traced, decided, outer=outer)
    object.__setattr__(model, "_distributed_session", session)
    mixin.add(model, DistributedStep)
    traced.enter(model)
    try:
        with session.undo:
            prepare_optimizers(model)
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


def reuse_train_function(model: Any) -> None:
    """Use the train function of the last fit, if all ranks can. A collective."""
    session = session_of(model)
    session.options = (
        session.decided.rates,
        optimizers_of(model),
        averaging_of(model),
        session.decided.batch_norm,
        session.may_read_on,
        session.decided.feed.class_weight,
    )
    function = session.traced.find_train_function(session.options)
    if all(comm.gather(function is not None)):
        model.train_function = function
