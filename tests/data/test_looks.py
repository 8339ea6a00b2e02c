"""First batches are read without changing later passes, many times each."""

import os
import threading

import numpy as np
import pytest
import tensorflow as tf
from harness import data_kinds

from keras_dist.data.adapters import adapt_batches
from keras_dist.data.division import ReadContext
from keras_dist.data.source import Source

ROWS, BATCH, BATCHES = 36, 4, 9

# LOOKS=200 tries each pipeline 200 times.
TIMES = int(os.environ.get("LOOKS", "4"))


WINDOWS = "windows of a time series"
KINDS = ["batched", "shuffled", "zipped rows", "mapped", "interleaved", WINDOWS]


def read_ahead(kind):
    """Data with threads that are far ahead of a look, and may be cut short by it."""
    x = np.arange(float(ROWS))
    return data_kinds.BATCHES[kind](x, x, BATCH).prefetch(16)


# A cache of its own for each try.
ENDS = {
    "cached in memory": lambda dataset, path: dataset.cache(),
    "cached in a file": lambda dataset, path: dataset.cache(path),
    "saved by snapshot": lambda dataset, path: dataset.snapshot(path),
    "cached by rows": lambda dataset, path: dataset.unbatch().cache().batch(BATCH),
    "cached, then read ahead": lambda dataset, path: dataset.cache().prefetch(2),
    "cached, then mapped in threads": lambda dataset, path: (
        dataset.cache().map(lambda *batch: batch, 2).prefetch(tf.data.AUTOTUNE)
    ),
    "cached, then shuffled": lambda dataset, path: (
        dataset.unbatch().cache().shuffle(8, seed=1).batch(BATCH).prefetch(1)
    ),
}
CASES = [(kind, "cached in memory") for kind in KINDS]
CASES += [(WINDOWS, end) for end in ENDS if "memory" not in end]


def count(dataset):
    """Batches and rows of a pass, counted by TensorFlow."""

    def add(state, *batch):
        rows = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        return state[0] + 1, state[1] + rows

    zero = tf.constant(0, tf.int64)
    options = tf.data.Options()
    options.autotune.enabled = False  # or a pass waits at its end
    dataset = dataset.with_options(options)
    return [int(number) for number in dataset.reduce((zero, zero), add)]


@pytest.mark.parametrize(("kind", "end"), CASES)
def test_a_look_changes_nothing(kind, end, tmp_path):
    """Each pipeline many times: afterwards, a pass has all of its batches."""
    pipeline = read_ahead(kind)
    for number in range(TIMES):
        dataset = ENDS[end](pipeline, str(tmp_path / str(number)))
        source = Source(dataset)
        source.fingerprint(2) if number % 2 else source.first(3)
        assert count(dataset) == [BATCHES, ROWS], number


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_pass_of_one_rank_reads_all(size):
    """Even if only its own steps are read, as by Keras; in validation too."""
    pipeline = read_ahead(WINDOWS)
    for number in range(max(2, TIMES // 20)):
        dataset = pipeline.cache()
        for rank in range(size):
            context = ReadContext(rank, size, keeps_position=size == 1)
            # Kept until the pass is read, as by a feed.
            source = Source(dataset)
            source.is_replicated = True
            own = adapt_batches(source, context, is_training=bool(number % 2))
            steps = own.length or BATCHES
            for _, _batch in zip(range(int(steps)), own.data, strict=False):
                pass
            assert count(dataset) == [BATCHES, ROWS], (number, rank)


def test_a_pass_that_is_not_tuned_reads_ahead():
    """The next batch is made while this one is trained, as where TensorFlow tunes."""
    is_ahead = threading.Event()

    def two():
        yield 0
        is_ahead.set()
        yield 1

    spec = tf.TensorSpec([], tf.int32)
    data = tf.data.Dataset.from_generator(two, output_signature=spec)
    batches = iter(Source(data))
    assert next(batches) == 0
    assert is_ahead.wait(20)
    assert [int(number) for number in batches] == [1]
