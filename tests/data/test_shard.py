"""Data that is divided before it is decoded: all ranks in one process.

The oracle is the global batch of one process: rows i × N × B and those after them.
"""

import itertools
import os
import random

import numpy as np
import pytest
import tensorflow as tf
from data_kinds import ids_of_batches

import keras_dist
from keras_dist.data.adapters import training_feed, validation_feed
from keras_dist.data.division import ShardSpec
from keras_dist.data.pipeline import list_seeds, list_unshuffled_inputs
from keras_dist.data.presharded import (
    Presharded,
    divide_rows,
    presharded_of,
)
from keras_dist.data.source import Source

# Random shapes of data that are tried; LONG_TESTS=1 tries more.
COUNT = 60 if os.environ.get("LONG_TESTS") else 8


def rows_of(count):
    """Rows whose target is their number."""
    ids = np.arange(count)
    return tf.data.Dataset.from_tensor_slices((ids.astype("float32"), ids))


def halved(x, y):
    """A map for rows."""
    return x / 2, y


def in_batches(rows, size):
    """What a script makes of them."""
    return rows.map(halved, 2).batch(size).prefetch(2)


def own_data(source, division, rank, finish):
    """One rank's data."""
    batch_size, size = division
    own = divide_rows(Presharded(batch_size, rank, size, source))
    return Source(finish(own))


def feeds_of(source, division, finish, *, name="training", **spec):
    """The feeds of all ranks, which know each other's lengths."""
    size = division[1]
    sources = [own_data(source(), division, rank, finish) for rank in range(size)]
    lengths = tuple(own.length for own in sources)
    feeds = []
    for rank, own in enumerate(sources):
        own.lengths = lengths
        of_rank = ShardSpec(rank, size, **spec)
        given = {"batch_size": None, "steps_rule": "divide", "spec": of_rank}
        if name == "training":
            given |= {"shuffle": True, "steps_per_epoch": None}
            feeds.append(training_feed(own, None, None, **given))
        else:
            feeds.append(validation_feed(own, steps=None, **given))
    return feeds


def read(feed, epoch=0):
    """Row numbers of each step of one epoch; none where a batch does not count."""
    feed.begin_epoch(epoch)
    data = feed.arguments["x"]
    if not feed.is_marked:
        return ids_of_batches(data)
    marks = [int(mark[0]) for _, mark in data]
    rows = ids_of_batches([batch for batch, _ in data])
    return [own * mark for own, mark in zip(rows, marks, strict=True)]


def global_batches(ranks):
    """The rows of all ranks at each step, which all make."""
    assert len({len(rank) for rank in ranks}) == 1
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def of_one_process(count, batch, size):
    """Its global batches."""
    whole = batch * size
    return [list(range(i, min(i + whole, count))) for i in range(0, count, whole)]


def shapes(count, seed):
    """Random numbers of rows, batches and ranks; small numbers come more often."""
    draws = random.Random(seed)
    for _ in range(count):
        size, batch = draws.randint(2, 4), draws.randint(1, 5)
        rows = draws.randint(size, draws.choice([size * batch + size, 50]))
        yield rows, batch, size


def test_all_ranks_read_the_global_batches_of_one_process():
    """In two epochs, in equally many steps."""
    for count, batch, size in shapes(COUNT, seed=1):
        feeds = feeds_of(
            lambda n=count: rows_of(n),
            (batch, size),
            lambda rows, b=batch: in_batches(rows, b),
        )
        expected = of_one_process(count, batch, size)
        for _ in range(2):
            ranks = [read(feed) for feed in feeds]
            assert global_batches(ranks) == expected, (count, batch, size)
        for feed in feeds:
            assert feed.plan.steps == len(expected) == feed.arguments["x"].cardinality()
            assert feed.plan.steps_before == -(-count // batch)


def test_an_evaluation_reads_each_row_once():
    """Whatever the numbers of rows, batches and ranks are."""
    for count, batch, size in shapes(COUNT // 2, seed=3):
        feeds = feeds_of(
            lambda n=count: rows_of(n),
            (batch, size),
            lambda rows, b=batch: in_batches(rows, b),
            name="validation",
        )
        read_rows = [row for feed in feeds for own in read(feed) for row in own]
        assert sorted(read_rows) == list(range(count))


SOURCES = {
    "shuffled": lambda: rows_of(29).shuffle(29, seed=4),
    "shuffled once": lambda: rows_of(29).shuffle(
        9, seed=4, reshuffle_each_iteration=False
    ),
    "repeated": lambda: rows_of(9).repeat(3),
    "cached": lambda: rows_of(29).cache(),
    "cached and shuffled": lambda: rows_of(29).cache().shuffle(9, seed=4),
    "zipped": lambda: tf.data.Dataset.zip((rows_of(29), rows_of(29))).map(
        lambda one, _: one
    ),
    "concatenated": lambda: rows_of(20).concatenate(rows_of(9)),
    "interleaved": lambda: (
        tf.data.Dataset.range(3)
        .interleave(lambda n: rows_of(29).shard(3, n))
        .apply(tf.data.experimental.assert_cardinality(29))
    ),
    "of names": lambda: rows_of(29).map(lambda x, y: {"x": x, "y": y}),
}
FINISHES = {
    "batched": lambda rows: rows.batch(4),
    "mapped": lambda rows: in_batches(rows, 4),
    "cached": lambda rows: rows.map(halved).cache().batch(4),
    "batches cached": lambda rows: rows.batch(4).cache().prefetch(2),
    "with options": lambda rows: rows.batch(4).with_options(tf.data.Options()),
    "weighted": lambda rows: rows.map(lambda x, y: (x, y, x)).batch(4),
    "zipped": lambda rows: tf.data.Dataset.zip((rows, rows)).map(one_of_two).batch(4),
}


def one_of_two(one, _):
    """The first of two equal rows."""
    return one


def keys(row):
    """A row of names as a pair."""
    return row["x"], row["y"]


@pytest.mark.parametrize("name", [*SOURCES, *(f"then {name}" for name in FINISHES)])
def test_a_division_is_known_through_the_pipeline(name):
    """What comes before and after it; two epochs are those of one process."""
    source = SOURCES.get(name, SOURCES["shuffled"])
    finish = FINISHES.get(name.removeprefix("then "), FINISHES["batched"])
    if name == "of names":
        finish = lambda rows: rows.map(keys).batch(4)  # noqa: E731
    feeds = feeds_of(source, (4, 3), finish)
    assert all("sharded before decoding, by row" in feed.plan.kind for feed in feeds)
    oracle = finish(source())
    for _ in range(2):
        rows = list(itertools.chain(*ids_of_batches(oracle)))
        whole = [sorted(rows[i : i + 12]) for i in range(0, len(rows), 12)]
        assert global_batches([read(feed) for feed in feeds]) == whole


def test_data_of_unknown_length_ends_after_the_same_step():
    """Filtered before it is divided."""
    for size in (2, 3):
        own = [
            own_data(
                rows_of(40).filter(lambda x, y: y % 3 > 0),
                (4, size),
                rank,
                lambda rows: rows.batch(4),
            )
            for rank in range(size)
        ]
        assert [source.length for source in own] == [None] * size
        kept = [row for row in range(40) if row % 3]
        found = [itertools.chain(*ids_of_batches(source.data)) for source in own]
        assert sorted(itertools.chain(*found)) == kept


def test_batches_that_do_not_fit_are_an_error():
    """Rows are left out after the division."""
    finish = lambda rows: rows.filter(lambda x, y: y < 9).apply(counted)  # noqa: E731
    with pytest.raises(ValueError, match="different num"):
        feeds_of(lambda: rows_of(40), (4, 2), finish)


def counted(rows):
    """As many as the rank of these rows has: 5 of rank 0, and more of rank 1."""
    first = next(iter(rows.as_numpy_iterator()))[1]
    count = tf.data.experimental.assert_cardinality(5 if first == 0 else 20)
    return rows.apply(count).batch(4)


def test_several_data_sets_must_be_divided_alike():
    """Zipped or concatenated: all of them, or what is made of them."""
    one, other = (divide_rows(Presharded(size, 0, 2, rows_of(9))) for size in (2, 3))
    assert presharded_of(tf.data.Dataset.zip((one, one))).batch_size == 2
    for mixed in (
        tf.data.Dataset.zip((one, other)),
        tf.data.Dataset.zip((one, rows_of(9))),
        one.concatenate(rows_of(9)).batch(2),
        one.enumerate(),  # other numbers than on one process
    ):
        with pytest.raises(ValueError, match="has not divided alike"):
            presharded_of(mixed)
    assert presharded_of(rows_of(9).batch(2)) is None


def test_what_was_before_is_seen_through_two_private_names():
    """`_inputs` and `_seed` of a data set of TensorFlow."""
    tf.random.set_seed(5)
    data = rows_of(9).shuffle(9).map(halved).shuffle(4, seed=8).batch(2)
    seeds = list_seeds(data)
    assert len(seeds) == 2 and seeds[0] == (5, 8) and (0, 0) not in seeds
    (first,) = list_unshuffled_inputs(data)
    assert ids_of_batches(first.batch(9)) == [list(range(9))]


def test_on_one_process_nothing_is_changed():
    """The same object, whatever it is; wrong arguments are errors all the same."""
    data = rows_of(5)
    assert data.apply(keras_dist.shard(4)) is data
    with pytest.raises(ValueError, match="`batch_size`"):
        keras_dist.shard(0)
    with pytest.raises(TypeError):
        keras_dist.shard(["a.jpg"])
    with pytest.raises(TypeError, match="for `tf.data.Dataset.apply`"):
        keras_dist.shard(4)([1, 2])
