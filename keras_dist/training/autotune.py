"""Turn off the tuning of input pipelines, which delays the end of each pass."""

import contextlib
from typing import Any

from keras_dist import comm, mixin
from keras_dist.data.pipeline import as_untuned


def without_autotune(model: Any) -> contextlib.AbstractContextManager[None]:
    """Context manager in which a pass over the data ends with its last batch.

    See `WithoutAutotune`.
    """
    is_plain = comm.size() == 1
    return contextlib.nullcontext() if is_plain else mixin.use(model, WithoutAutotune)


def plain_strategy(model: Any) -> Any:
    """Return the `tf.distribute.Strategy` of `model`, in `without_autotune`, too."""
    strategy = model.distribute_strategy
    return strategy.plain if isinstance(strategy, _Strategy) else strategy


class _Strategy:
    """A `tf.distribute.Strategy` that turns off tuning of all data that Keras reads."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return self.plain.experimental_distribute_dataset(as_untuned(dataset), options)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # a copy that is being made does not have it yet
            raise AttributeError(name)
        return getattr(self.plain, name)


class WithoutAutotune:
    """Mixin for a model: read data without TensorFlow's tuning thread.

    TensorFlow tunes each pass over a `tf.data.Dataset` (Keras makes one of all data) in
    a thread, which sleeps for 10 ms, then twice as long each time, up to a minute. At
    the end of the pass TensorFlow wakes the thread and waits for it. But the thread is
    woken before the stop flag is set: it may see no flag, and sleep again. On a rank
    with one core this happens nearly always, and a pass takes up to twice as long, or
    a minute more. Without the thread, the stages of the pipeline that use
    `tf.data.AUTOTUNE` keep their initial parallelism: all threads of this rank, at
    most 16.

    On one rank nothing is changed, and neither is a data set whose options turn tuning
    on or off.

    Source:
        `CancellationManager::StartCancelWithStatus` and `Model::OptimizeLoop` of
        TensorFlow: waiters are woken before `IsCancelled` is true.
    """

    @property
    def distribute_strategy(self) -> Any:
        strategy = super().distribute_strategy  # type: ignore[misc]
        return strategy if comm.size() == 1 else _Strategy(strategy)
