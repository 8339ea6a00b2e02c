"""Batches sharded round robin: every small case, all ranks in one process."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_kinds import counted_batches

from keras_dist.data.adapters import adapt_batches
from keras_dist.data.division import DataPosition, ShardSpec
from keras_dist.data.pipeline import count_batches
from keras_dist.data.source import EQUAL_ROWS, Source

# Ranks, batches, and rows of the last one; the others have three.
CASES = [(2, 1, 1), (2, 3, 1), (2, 4, 2), (3, 1, 2), (3, 4, 2), (3, 5, 1), (3, 6, 3)]


class Sequence(keras.utils.PyDataset):
    """Batches of three rows, with a last one of any length."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.read = batches, []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.read.append(index)
        return self.batches[index], self.batches[index] * 2


def make_batches(count, last):
    """The numbers 0, 1, 2, … in batches."""
    rows = np.arange(3 * (count - 1) + last)
    return [rows[start : start + 3] for start in range(0, len(rows), 3)]


def dataset_of(batches, is_known=True):
    """The same as a data set of known or unknown length."""
    rows = np.concatenate(batches)
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows * 2)).batch(3)
    return dataset if is_known else dataset.filter(lambda x, y: True)


MAKERS = {
    "known": dataset_of,
    "unknown": lambda batches: dataset_of(batches, is_known=False),
    "sequence": Sequence,
    "generator": lambda batches: ((batch, batch * 2) for batch in batches),
}


def dealt(data, spec, **arguments):
    """A rank's part of data that is the same on all ranks."""
    return adapt_batches(Source(data, is_same=True), spec, **arguments)


def read(data, rank, size, is_training):
    """Rows of `x` that a rank reads, batch by batch."""
    own = dealt(data, ShardSpec(rank, size), is_training=is_training)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in counted_batches(own)]
    assert all((y == 2 * x).all() for x, y in pairs)
    assert own.length is None or 0 <= own.length - len(pairs) <= 1
    return [x.tolist() for x, _ in pairs]


@pytest.mark.parametrize("kind", MAKERS)
def test_batches_are_sharded_round_robin(kind):
    """Disjoint and complete: rank r has the batches r, r + `size`, …."""
    for size, count, last in CASES:
        batches = make_batches(count, last)
        for rank in range(size):
            own = [batch.tolist() for batch in batches[rank::size]]
            assert read(MAKERS[kind](batches), rank, size, True) == own
            part = dealt(MAKERS[kind](batches), ShardSpec(rank, size), is_training=True)
            assert part.length in (None, -(-count // size))


def test_a_sequence_makes_its_own_batches_only():
    """No rank makes a batch that another rank trains on."""
    data = Sequence(make_batches(6, 3))
    assert read(data, 1, 3, True) == [[3, 4, 5], [12, 13, 14]]
    assert set(data.read) == {1, 4}


def test_a_shuffled_sequence_has_one_order_whatever_the_size():
    """Each batch once an epoch, another order each epoch, the last one last."""
    orders = []
    for size in (2, 3):
        order = []
        for epoch in range(2):
            shards = []
            for rank in range(size):
                data = Sequence(make_batches(12, 1))
                spec = ShardSpec(rank, size, seed=4)
                own = dealt(data, spec, is_training=False, shuffle=True)
                own.epoch.assign(epoch)
                shards.append([own.data[i][0][0] for i in range(own.data.num_batches)])
            order += [first for step in zip(*shards, strict=True) for first in step]
        orders.append([int(first) for first in order])
    assert orders[0] == orders[1]
    assert sorted(orders[0][:12]) == sorted(orders[0][12:]) == list(range(0, 36, 3))
    assert orders[0][:12] != orders[0][12:]
    assert orders[0][11] == orders[0][23] == 33


def gather_next(others, own):
    """What this rank says, and the next that the other one says."""
    return [own, (others.pop(0), "")]


def test_a_rank_whose_data_has_ended_takes_part_without_rows():
    """Until no rank has a batch left; one that never had one is an error on all."""
    for others, expected in (
        ([0, 0, 0, 0, 1], [1, 1, 0, 0]),  # the other rank has two batches more
        ([0, 0, 1], [1, 1]),
    ):
        gather = functools.partial(gather_next, others)
        data = Source(dataset_of(make_batches(2, 1), is_known=False))
        own = adapt_batches(data, ShardSpec(0, 2, gather=gather), is_training=True)
        assert [int(mark[0]) for _, mark in own.data] == expected
    empty = 2
    data = Source(dataset_of(make_batches(2, 1), is_known=False))
    spec = ShardSpec(0, 2, gather=lambda own: [own, (empty, "")])
    own = adapt_batches(data, spec, is_training=True)
    with pytest.raises(tf.errors.OpError):
        list(own.data)
    assert "at least one row" in str(own.reader.failure)
    assert "on ranks [0] of 2 alone" in str(own.reader.failure)


def test_an_infinite_data_set_is_sharded_without_an_end():
    """It has no tail, whose rows would be sharded."""
    data = dataset_of(make_batches(2, 3)).repeat()
    own = dealt(data, ShardSpec(1, 3), is_training=True)
    assert own.length == math.inf == count_batches(data)
    assert [x.numpy()[0] for x, _ in own.data.take(2)] == [3, 0]


def test_one_rank_that_resumes_gets_no_marks():
    """No batch is left over there, also of batches with a constant number of rows."""
    rows = np.arange(12)
    data = tf.data.Dataset.from_tensor_slices((rows, rows * 2))
    data = data.batch(3, drop_remainder=True)
    position = DataPosition(0, 1, 1)
    spec = ShardSpec(0, 1, keeps_position=True, position=position)
    own = adapt_batches(Source(data), spec, is_training=True)
    assert not own.is_marked
    assert [x.numpy().tolist() for x, _ in own.data] == [
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_the_inspected_batches_of_a_generator_are_not_lost():
    """They are read again."""
    source = Source(iter(range(5)))
    assert source.first(2) == [0, 1] and source.first(3) == [0, 1, 2]
    assert list(source) == [0, 1, 2, 3, 4]


def test_structures_and_dtypes_stay_what_they_are():
    """Dicts, strings, integers and equal lengths, whichever file shards them."""
    rows = {"a": np.arange(7), "b": np.array([f"row {i}" for i in range(7)])}
    data = tf.data.Dataset.from_tensor_slices((rows, np.ones((7, 2)))).batch(2)
    for dataset in (data, data.filter(lambda x, y: True)):
        own = dealt(dataset, ShardSpec(0, 3), is_training=False)
        batches = list(own.data)
        assert [x["b"].numpy().tolist() for x, _ in batches] == [
            [b"row 0", b"row 1"],
            [b"row 6"],
        ]
        assert batches[0][0]["a"].dtype == tf.int64
        assert batches[0][1].shape == (2, 2) and batches[0][1].dtype == tf.float64


def test_components_are_compared_by_their_rows():
    """Also text, ragged rows and scalars; equal rows show nothing."""
    batch = (
        tf.constant(["tea", "milk"]),
        tf.constant([[1.0], [2.0]]),
        tf.zeros([2, 3]),
        tf.ragged.constant([[1], [2, 3]]),
        tf.constant(1),
    )
    text, numbers, *others = Source(tf.data.Dataset.from_tensors(batch)).fingerprint(1)
    assert text != numbers
    is_equal = [one.startswith(EQUAL_ROWS) for one in (text, numbers, *others)]
    assert is_equal == [False, False, True, True, True]
