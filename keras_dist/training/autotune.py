"""Passes over data that end at once: input pipelines that TensorFlow does not tune."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist import comm, mixin


@contextlib.contextmanager
def untuned(model: Any) -> Iterator[None]:
    """Inside the block, passes over the data of `model` end when their last batch has.

    A thread of TensorFlow's tunes each pass over a `tf.data.Dataset` (Keras makes one
    of all data), at times that double from 10 ms to a minute. At the end of the pass it
    is told to stop and then waited for, but it looks before the word is there and
    sleeps on until its next time: nearly always where a rank has one core. A pass
    then takes up to twice as long, or a minute more. Without the thread, stages of
    the pipeline that asked for `tf.data.AUTOTUNE` keep the parallelism it begins with:
    all threads of this rank, at most 16.

    On one rank nothing is changed; nor is data whose options say whether it is tuned.

    Args:
        model: A `keras.Model`.

    Source:
        `CancellationManager::StartCancelWithStatus` and `Model::OptimizeLoop` of
        TensorFlow: waiters are woken before `IsCancelled` is true.
    """
    if comm.size() == 1 or mixin.has(model, _Untuned):
        yield
        return
    mixin.add(model, _Untuned)
    try:
        yield
    finally:
        mixin.remove(model, _Untuned)


def plain_strategy(model: Any) -> Any:
    """The `tf.distribute.Strategy` of `model`, inside of `untuned` too."""
    strategy = model.distribute_strategy
    return strategy.plain if isinstance(strategy, _Strategy) else strategy


def as_untuned(dataset: Any) -> Any:
    """The same data set, not tuned where its options do not say.

    >>> data = tf.data.Dataset.range(3)
    >>> as_untuned(data).options().autotune.enabled
    False
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class _Strategy:
    """A strategy through which all data goes that Keras reads."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return self.plain.experimental_distribute_dataset(as_untuned(dataset), options)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.plain, name)


class _Untuned:
    """What `untuned` puts in front of the class of a model."""

    @property
    def distribute_strategy(self) -> Any:
        return _Strategy(super().distribute_strategy)  # type: ignore[misc]
