"""Every kind of data that `fit` and `evaluate` take, made of rows of `x` and `y`."""

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# The length of a window of a time series.
WINDOW = 3


class Listed(keras.utils.PyDataset):
    """Batches of a list."""

    def __init__(self, batches, **arguments):
        super().__init__(**arguments)
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Sequence(Listed):
    """Batches of the given sizes, in turn; the last one has what is left."""

    def __init__(self, x, y, sizes, **arguments):
        ends = [0]
        while ends[-1] < len(y):
            ends.append(min(ends[-1] + sizes[(len(ends) - 1) % len(sizes)], len(y)))
        parts = itertools.starmap(slice, itertools.pairwise(ends))
        super().__init__([(x[part], y[part]) for part in parts], **arguments)


class Loader:
    """An iterable with a length, as a `DataLoader` of torch is."""

    def __init__(self, x, y, size):
        self.batches = Sequence(x, y, [size]).batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class WithoutLength:
    """An iterable without a length."""

    def __init__(self, x, y, size):
        self.batches = Loader(x, y, size)

    def __iter__(self):
        return iter(self.batches)


slices = tf.data.Dataset.from_tensor_slices


def rows_of(x, y):
    return slices((x, y))


def kept(*_):
    """For `filter`: all rows remain, but TensorFlow cannot know how many."""
    return True


def unchanged(x, y):
    """For `map`."""
    return x, y


def concatenated(x, y, size):
    """With a short batch in the middle."""
    middle = (len(y) + 1) // 2
    first, second = rows_of(x[:middle], y[:middle]), rows_of(x[middle:], y[middle:])
    return first.batch(size).concatenate(second.batch(size))


def interleaved(x, y, size):
    """The rows of three sources in turn."""
    rows = rows_of(x, y)
    return (
        tf.data.Dataset.range(3)
        .interleave(lambda source: rows.shard(3, source), 3, num_parallel_calls=2)
        .batch(size)
    )


def in_buckets(x, y, size):
    """By a length: batches of several sizes, in another order than the rows."""
    return rows_of(x, y).bucket_by_sequence_length(
        lambda x, y: tf.cast(y, tf.int32) % 7, [2, 5], [size, size + 1, 2]
    )


def of_generator(x, y, size):
    batches = Loader(x, y, size)
    signature = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)]
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tuple(signature)
    )


def counted_generator(x, y, size):
    count = tf.data.experimental.assert_cardinality(len(Loader(x, y, size)))
    return of_generator(x, y, size).apply(count)


def windows(x, y, size, **arguments):
    """Windows of a time series of which `x` is the beginning, as Keras makes them."""
    series = np.concatenate([x, x[: WINDOW - 1], x[:1], x[:1]])[: len(y) + WINDOW - 1]
    return keras.utils.timeseries_dataset_from_array(
        series, y, WINDOW, batch_size=size, **arguments
    )


def windows_of_windows(x, y, size):
    """As TensorFlow's guides make them: of unknown length."""
    series = rows_of(x, y).window(1, shift=1)
    return series.flat_map(lambda x, y: tf.data.Dataset.zip((x.batch(1), y))).batch(
        size
    )


def generated(x, y, size) -> Iterator[Any]:
    yield from Loader(x, y, size)


# Data that comes in batches, made by a function of rows of `x` and `y`, and a size.
BATCHES = {
    "batched": lambda x, y, size: rows_of(x, y).batch(size),
    "rows cached": lambda x, y, size: rows_of(x, y).cache().batch(size),
    "batches cached": lambda x, y, size: rows_of(x, y).batch(size).cache(),
    "read ahead": lambda x, y, size: rows_of(x, y).batch(size).prefetch(3),
    "cached, read ahead": lambda x, y, size: (
        rows_of(x, y).batch(size).cache().prefetch(8)
    ),
    "mapped": lambda x, y, size: (
        rows_of(x, y).map(unchanged, 2).batch(size).map(unchanged)
    ),
    "shuffled": lambda x, y, size: rows_of(x, y).shuffle(9, seed=1).batch(size),
    "shuffled once, cached": lambda x, y, size: (
        rows_of(x, y)
        .shuffle(99, seed=1, reshuffle_each_iteration=False)
        .batch(size)
        .cache()
    ),
    "repeated": lambda x, y, size: rows_of(x, y).repeat(2).batch(size),
    "skipped and taken": lambda x, y, size: (
        rows_of(x, y).skip(1).take(len(y) // 2 + 1).batch(size)
    ),
    "zipped rows": lambda x, y, size: tf.data.Dataset.zip((slices(x), slices(y))).batch(
        size
    ),
    "zipped batches": lambda x, y, size: tf.data.Dataset.zip(
        (slices(x).batch(size), slices(y).batch(size))
    ),
    "concatenated": concatenated,
    "windows of a time series": windows,
    "windows, shuffled": lambda x, y, size: windows(x, y, size, shuffle=True, seed=2),
    "windows, cached, read ahead": lambda x, y, size: (
        windows(x, y, size).cache().prefetch(4)
    ),
    "a counted generator": counted_generator,
    # Of unknown length.
    "filtered rows": lambda x, y, size: rows_of(x, y).filter(kept).batch(size),
    "filtered batches": lambda x, y, size: rows_of(x, y).batch(size).filter(kept),
    "filtered, cached": lambda x, y, size: (
        rows_of(x, y).filter(kept).batch(size).cache()
    ),
    "batched anew": lambda x, y, size: (
        rows_of(x, y).batch(size + 2).unbatch().batch(size)
    ),
    "interleaved": interleaved,
    "in buckets": in_buckets,
    "windows of windows": windows_of_windows,
    "windows, filtered": lambda x, y, size: windows(x, y, size).filter(kept).cache(),
    "a generator in a data set": of_generator,
    # No data sets.
    "sequence": lambda x, y, size: Sequence(x, y, [size]),
    "sequence of uneven batches": lambda x, y, size: Sequence(x, y, [size, 1, 5]),
    "sequence of threads": lambda x, y, size: Sequence(x, y, [size], workers=2),
    "loader": Loader,
    "iterable": WithoutLength,
    "generator": generated,
}


def on_disk(x, y, _):
    """A memory-mapped file and an array."""
    with tempfile.NamedTemporaryFile() as file:
        mapped = np.memmap(file.name, x.dtype, "w+", shape=x.shape)
        mapped[:] = x
    return mapped, y


ARRAYS = {
    "arrays": lambda x, y, _: (x, y),
    "tensors": lambda x, y, _: (tf.constant(x), tf.constant(y)),
    "arrays on disk": on_disk,
}
KINDS = ARRAYS | BATCHES
