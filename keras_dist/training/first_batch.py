"""Read the first batch of a fit as numbers, before the first step is traced."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data.pipeline import as_untuned


def start_on_first_batch(
    function: Callable[[Any], Any],
    *,
    steps: int,
    needs_batch: Callable[[], bool],
    start: Callable[[Any], None],
) -> Callable[[Any], Any]:
    """Return a train function that calls `start` with the first batch, then trains.

    Keras's loop gives the train function an iterator, which it reads inside of a graph.
    What has to be done before the first step with numbers is done here: the batches of
    the first call are read, and passed on.

    Args:
        function: The train function that Keras has made.
        steps: How many batches it reads in one call.
        needs_batch: Whether `start` has to be called; asked at each call.
        start: Called with the first batch.
    """

    def train(iterator: Any) -> Any:
        if needs_batch():
            batches = list(itertools.islice(iterator, steps))
            if batches:
                start(keras.tree.map_structure(_none_or_leaf, batches[0]))
                iterator = _prepend(batches, iterator)
        return function(iterator)

    return train


def _none_or_leaf(leaf: Any) -> Any:
    # What Keras's adapters have in place of `None` in a data set.
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _prepend(batches: list[Any], iterator: Any) -> Any:
    """Return an iterator with the batches for one call, of the same kind."""
    if not isinstance(iterator, tf.data.Iterator):
        return itertools.chain(batches, iterator)
    spec = iterator.element_spec
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    # With the lengths that the data's own spec leaves open: else the step was traced
    # once more.
    return iter(as_untuned(dataset.map(lambda *batch: _relax(batch, spec))))


def _relax(batch: tuple[Any, ...], spec: Any) -> Any:
    batch = batch if isinstance(spec, tuple) else batch[0]

    def relax(own: Any, leaf: Any) -> Any:
        if not isinstance(own, tf.TensorSpec):
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, own.shape)

    return tf.nest.map_structure(relax, spec, batch)
