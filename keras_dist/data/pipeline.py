"""Read what a `tf.data.Dataset` was made of: its inputs, shuffles and caches."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def has_cache_in_memory(dataset: tf.data.Dataset) -> bool:
    """Whether a data set, or one that it was made of, keeps its elements in memory."""
    if tf.get_static_value(getattr(dataset, "_filename", None)) == b"":
        return True
    return any(map(has_cache_in_memory, inputs_of(dataset)))


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that `dataset` was made of (docs/decisions.md)."""
    # `apply` of a function that returns its argument makes some their own input.
    return [one for one in dataset._inputs() if one is not dataset]


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Rows in each batch but for the last one, `None` if unknown.

    >>> data = tf.data.Dataset.range(9).batch(4).map(lambda number: number * 2)
    >>> batch_size_of(data.prefetch(2))
    4
    """
    for node in nodes(dataset):
        if hasattr(node, "_batch_size"):
            found = tf.get_static_value(node._batch_size)
            return None if found is None else int(found)
    return None


def seeds_of(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Seeds of each shuffle and each random source; (0, 0) is a new one each time.

    >>> tf.random.set_seed(1)
    >>> seeds_of(tf.data.Dataset.range(9).shuffle(9, seed=2).batch(2))
    [(1, 2)]
    """
    return [
        (int(node._seed), int(node._seed2))
        for node in nodes(dataset)
        if _has_seed(node)
    ]


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Whether each pass has another order, as after `shuffle`."""
    names = ("_reshuffle_each_iteration", "_rerandomize_each_iteration")
    return any(
        any(getattr(node, name, False) is not False for name in names)
        for node in nodes(dataset)
        if _has_seed(node)
    )


def has_seeded_passes(dataset: tf.data.Dataset) -> bool:
    """Whether each pass has another order, which follows from seeds and its number.

    Who begins a pass over such data, and be it to look at one batch, changes the order
    of all later ones.
    """
    return is_reshuffled(dataset) and (0, 0) not in seeds_of(dataset)


# At the end of each epoch of data of known length Keras makes an iterator that it does
# not read. A shuffle draws the seeds of a pass when its iterator is made: so every
# second pass is read.
_PASSES_OF_EPOCH = 2


def skip_epochs(dataset: tf.data.Dataset, count: int) -> None:
    """Let the next epoch have the order that it has after some others.

    Args:
        dataset: A data set for which `has_seeded_passes` is true. One that keeps what
            it has read, by `cache`, has one order only, and is left as it is.
        count: Number of epochs.
    """
    if any(hasattr(node, "_filename") for node in nodes(dataset)):
        return
    for _ in range(count * (_PASSES_OF_EPOCH if dataset.cardinality() >= 0 else 1)):
        iter(dataset)


def ending_like_known(
    batches: tf.data.Dataset,
    dataset: tf.data.Dataset,
    as_made: Callable[[Any], Any] = lambda batch: batch,
) -> tf.data.Dataset:
    """Return the same batches; at their end, a pass more over `dataset` begins.

    That is what Keras does on one process, where it sees how long `dataset` is.

    Args:
        batches: Batches of unknown number, made of `dataset`.
        dataset: A data set for which `has_seeded_passes` is true.
        as_made: What was made of a batch of `dataset`, in structure.
    """
    nothing = tf.data.Dataset.zip(tf.data.Dataset.range(0), dataset)

    @tf.autograph.experimental.do_not_convert
    def batch_of(_: tf.Tensor, batch: Any) -> Any:
        return as_made(batch)

    return batches.concatenate(nothing.map(batch_of))


def before_shuffles(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """What a data set is made of, before the first shuffle.

    Reading it changes no order: the next pass of a shuffle has another one.
    """
    if not any(map(_has_seed, nodes(dataset))):
        return [dataset]
    return [found for one in inputs_of(dataset) for found in before_shuffles(one)]


def nodes(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a data set, and all that it was made of."""
    yield dataset
    for one in inputs_of(dataset):
        yield from nodes(one)


def _has_seed(dataset: tf.data.Dataset) -> bool:
    return hasattr(dataset, "_seed") and hasattr(dataset, "_seed2")
