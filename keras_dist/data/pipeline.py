"""See what a `tf.data.Dataset` was made of, and change how one is read.

TensorFlow has no public way to look into a pipeline (docs/decisions.md).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import private
from keras_dist.private import inputs_of


def count_batches(data: Any) -> float | None:
    """Count the batches in one pass: a number, `math.inf`, or `None` for unknown.

    >>> count_batches(tf.data.Dataset.range(3)), count_batches(iter([]))
    (3, None)
    >>> count_batches(tf.data.Dataset.range(3).repeat())
    inf
    """
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            return math.inf
        return cardinality if cardinality >= 0 else None
    if isinstance(data, keras.utils.PyDataset):
        return math.inf if data.num_batches is None else data.num_batches
    try:
        return len(data)
    except TypeError:
        return None


def finite_or_none(length: float | None) -> int | None:
    """Return a number of batches; `None` if it is unknown or infinite.

    >>> finite_or_none(3), finite_or_none(None), finite_or_none(math.inf)
    (3, None, None)
    """
    return None if length is None or length == math.inf else int(length)


def nodes(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a data set, and all that it was made of."""
    yield dataset
    for one in inputs_of(dataset):
        yield from nodes(one)


def as_untuned(dataset: Any) -> Any:
    """Return the same data set, with tuning turned off unless its options set it.

    >>> data = tf.data.Dataset.range(3)
    >>> as_untuned(data).options().autotune.enabled
    False
    """
    is_dataset = isinstance(dataset, tf.data.Dataset)
    if not is_dataset or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def list_variables(dataset: tf.data.Dataset) -> list[Any]:
    """List the variables of a data set's functions: states of layers that draw."""
    return [v for node in nodes(dataset) for v in private.variables_in(node)]


def has_cache_in_memory(dataset: tf.data.Dataset) -> bool:
    """Return True if a data set, or one that it was made of, is cached in memory."""
    files = (tf.get_static_value(private.cache_file(node)) for node in nodes(dataset))
    return b"" in files


def cache_files(dataset: tf.data.Dataset) -> dict[str, tf.data.Dataset]:
    """Return the files in which a data set is cached, and what is cached in each.

    >>> list(cache_files(tf.data.Dataset.range(3).cache("rows").batch(2)))
    ['rows']
    """
    named = {tf.get_static_value(private.cache_file(n)): n for n in nodes(dataset)}
    return {name.decode(): node for name, node in named.items() if name}


def find_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Return the rows in each batch but for the last one, `None` if unknown.

    >>> data = tf.data.Dataset.range(9).batch(4).map(lambda number: number * 2)
    >>> find_batch_size(data.prefetch(2))
    4
    """
    for node in nodes(dataset):
        rows = private.batch_rows(node)
        if rows is not None:
            found = tf.get_static_value(rows)
            return None if found is None else int(found)
    return None


def list_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """List the seeds of shuffles and random sources; (0, 0) is new each time.

    >>> tf.random.set_seed(1)
    >>> list_seeds(tf.data.Dataset.range(9).shuffle(9, seed=2).batch(2))
    [(1, 2)]
    """
    found = map(private.seeds_of, nodes(dataset))
    return [(int(pair[0]), int(pair[1])) for pair in found if pair is not None]


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Return True if each pass has another order, as after `shuffle`.

    >>> random = tf.data.Dataset.random
    >>> [is_reshuffled(random(1, rerandomize_each_iteration=b)) for b in (False, True)]
    [False, True]
    """
    return any(map(private.is_reshuffled, nodes(dataset)))


def has_seeded_passes(dataset: tf.data.Dataset) -> bool:
    """Return True if the order of each pass follows from seeds and its number.

    Beginning a pass over such data, even to look at one batch, changes the order of all
    later ones.
    """
    return is_reshuffled(dataset) and (0, 0) not in list_seeds(dataset)


def is_read_anew(dataset: tf.data.Dataset) -> bool:
    """Return True if `cache` keeps no data set that has another order in each pass.

    What was kept has one order only, that of the pass in which it was read.

    >>> data = tf.data.Dataset.range(9)
    >>> [is_read_anew(d) for d in (data.cache().shuffle(9), data.shuffle(9).cache())]
    [True, False]
    """
    caches = (node for node in nodes(dataset) if private.cache_file(node) is not None)
    return not any(map(is_reshuffled, caches))


def list_unshuffled_inputs(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """List what a data set is made of, before the first shuffle.

    Reading it changes no order: the next pass of a shuffle has another one.
    """
    if not list_seeds(dataset):
        return [dataset]
    return [
        found for one in inputs_of(dataset) for found in list_unshuffled_inputs(one)
    ]


# At the end of each epoch of data of known length Keras makes an iterator that it does
# not read. A shuffle draws the seeds of a pass when its iterator is made: so every
# second pass is read.
_PASSES_OF_EPOCH = 2


def skip_epochs(dataset: tf.data.Dataset, count: int) -> None:
    """Let the next epoch have the order that it has after `count` others.

    One that is not `is_read_anew` is left as it is.
    """
    if is_read_anew(dataset):
        passes = _PASSES_OF_EPOCH if dataset.cardinality() >= 0 else 1
        for _ in range(count * passes):
            iter(as_untuned(dataset))


def begin_unread_pass(
    dataset: tf.data.Dataset, as_made: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Return a data set without batches, which begins a pass over `dataset`.

    Keras begins one of each epoch that it does not read (`_PASSES_OF_EPOCH`): at the
    end of an epoch, where it sees how long `dataset` is. Put this behind batches of
    which it does not, and before batches that are only made when they are read. The
    order of the next pass is then that on one process.

    Args:
        dataset: `has_seeded_passes` must be true.
        as_made: Gives a batch of it the structure of those that this stands beside.
    """
    nothing = tf.data.Dataset.zip(tf.data.Dataset.range(0), dataset)

    @tf.autograph.experimental.do_not_convert
    def batch_of(_: tf.Tensor, batch: Any) -> Any:
        return as_made(batch)

    return nothing.map(batch_of)


def map_batches(
    dataset: tf.data.Dataset, function: Callable[[Any], Any]
) -> tf.data.Dataset:
    """Map a function of a whole batch, several at a time; `map` unpacks tuples."""
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def call(*batch: Any) -> Any:
        return function(batch if is_tuple else batch[0])

    return dataset.map(call, tf.data.AUTOTUNE, deterministic=True)


def first_steps(dataset: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """Yield the first `steps` batches, or as many as there are.

    Finite data that is cached is read to its end: `take` would cut the cache short.

    >>> [int(number) for number in first_steps(tf.data.Dataset.range(5), 3)]
    [0, 1, 2]
    """
    length = finite_or_none(count_batches(dataset))
    if length is None or not has_cache_in_memory(dataset):
        return dataset.take(steps)

    first = select(dataset, lambda number: number < steps)
    return assert_length(first, min(steps, length))


def select(
    dataset: tf.data.Dataset,
    is_selected: Callable[[tf.Tensor], tf.Tensor],
    make: Callable[[tf.Tensor, Any], Any] = lambda _, element: element,
) -> tf.data.Dataset:
    """Yield `make(number, element)` of those of which the number is selected.

    All of `dataset` is read: to stop before its end would cut a cache in it short.

    >>> even = select(tf.data.Dataset.range(5, 10), lambda number: number % 2 == 0)
    >>> [int(value) for value in even]
    [5, 7, 9]
    """

    @tf.autograph.experimental.do_not_convert
    def is_kept(number: tf.Tensor, _: Any) -> tf.Tensor:
        return is_selected(number)

    @tf.autograph.experimental.do_not_convert
    def take_first(*window: Any) -> tf.data.Dataset:
        return tf.data.Dataset.zip(window).take(1)

    # Each comes when the next one was read, so the last one when all were.
    kept = dataset.enumerate().filter(is_kept).window(2, 1).flat_map(take_first)
    return kept.map(tf.autograph.experimental.do_not_convert(make))


def assert_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Make a pass over more or fewer batches than `length` an error.

    Keras takes fewer for the end of the epoch, and the other ranks would wait.
    """
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def with_length(dataset: tf.data.Dataset, steps: int) -> tf.data.Dataset:
    """Give a data set a cardinality of `steps` for Keras to see.

    One pass may be shorter: the epoch in which a training is resumed. Then
    `assert_cardinality` would raise an error.

    >>> data = with_length(tf.data.Dataset.range(2), 5)
    >>> int(data.cardinality()), len(list(data))
    (5, 2)
    """
    # A choice between two data sets, of which the second is infinite and never chosen.
    # TensorFlow takes the choice to be infinite, and its first `steps` batches to be
    # `steps`; reading still ends where `dataset` ends.
    first = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).repeat()
    dataset = tf.data.Dataset.choose_from_datasets([dataset, dataset.repeat()], first)
    return dataset.take(steps)


def resume_in_first_epoch(
    rest: tf.data.Dataset, whole: tf.data.Dataset, *, epoch: tf.Variable, steps: int
) -> tf.data.Dataset:
    """Yield `rest` in the first epoch, and `whole`, of `steps` batches, in later ones.

    `epoch` is an int64 variable that holds the number of the first epoch. An iterator
    reads the epoch whose number it holds when the iterator is made.
    """
    first = int(epoch.numpy())

    @tf.autograph.experimental.do_not_convert
    def epoch_batches(_: tf.Tensor) -> tf.data.Dataset:
        is_first = tf.cast(tf.equal(epoch.read_value(), first), tf.int64)
        # -1 takes all.
        return rest.take(-is_first).concatenate(whole.take(is_first - 1))

    dataset = tf.data.Dataset.range(1).flat_map(epoch_batches)
    return with_length(dataset, steps)
