"""Which rows each rank reads: every small case, against one process."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data.arrays import Arrays, RowOrder, is_arrays
from keras_dist.data.division import Division, ShardSpec, local_items

CASES = list(itertools.product(range(1, 5), range(1, 6), range(1, 40)))


def divided(num_rows, batch_size, size, steps=None):
    """Rows of arrays on some ranks, in batches of each."""
    per_step = batch_size * size
    spec = ShardSpec(0, size)
    return Division.of(spec, num_rows, per_step=per_step, unit="rows", steps=steps)


def rows_of_batch(division, step, rank):
    """Positions, in the order of a pass, of the rows that `rank` reads at `step`."""
    number, begin, end = division.span(step)
    assert number == 0
    return range(begin, end)[local_items(rank, division.size)]


def test_every_row_belongs_to_exactly_one_rank():
    """Shards are disjoint and cover everything."""
    for size in range(1, 8):
        for num_rows in range(50):
            sharded = [
                row
                for rank in range(size)
                for row in range(num_rows)[local_items(rank, size)]
            ]
            assert sorted(sharded) == list(range(num_rows))


def test_ranks_read_the_batches_of_one_process():
    """Interleaved, a step of all ranks is one global batch in its own order."""
    for size, batch_size, num_rows in CASES:
        division = divided(num_rows, batch_size, size)
        read, counts = [], [0] * size
        for step in range(division.steps):
            batches = [rows_of_batch(division, step, rank) for rank in range(size)]
            assert all(len(batch) <= batch_size for batch in batches) and batches[0]
            merged = sorted(row for batch in batches for row in batch)
            assert merged == list(range(merged[0], merged[0] + len(merged)))
            read += merged
            counts = [
                count + len(batch) for count, batch in zip(counts, batches, strict=True)
            ]
        assert read == list(range(num_rows))
        assert counts == [division.count_items(rank) for rank in range(size)]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_the_data_set_yields_the_rows_of_the_schedule(shuffle):
    """Each row once a pass, in an order that does not depend on the size."""
    num_rows, batches = 23, {}
    data = Arrays.of(np.arange(num_rows), np.arange(num_rows) * 2.0)
    for size, batch_size in ((1, 6), (2, 3), (3, 2)):
        passes = []
        readers = [
            reader(data, batch_size, rank, size, shuffle, None) for rank in range(size)
        ]
        for number in range(2):
            order = []
            batches_of_steps = zip(*(read(number) for read in readers), strict=True)
            for step, of_ranks in enumerate(batches_of_steps):
                global_batch = [None] * sum(len(batch[0]) for batch in of_ranks)
                for rank, (x, y) in enumerate(of_ranks):
                    global_batch[rank::size] = x.numpy().tolist()
                    assert (y.numpy() == 2 * x.numpy()).all()
                    assert y.dtype == tf.float32
                assert len(of_ranks[0][0]) <= batch_size
                order += global_batch
                if shuffle == "batch":
                    rows = range(step * 6, step * 6 + len(global_batch))
                    assert sorted(global_batch) == list(rows)
            assert sorted(order) == list(range(num_rows))
            passes.append(order)
        batches[size] = passes
        assert (passes[0] == passes[1]) == (shuffle is False)
    assert batches[1] == batches[2] == batches[3]


def reader(data, batch_size, rank, size, shuffle, steps):
    """A function that reads the batches of one rank in an epoch."""
    division = divided(data.num_rows, batch_size, size, steps)
    own = RowOrder(division, rank, shuffle=shuffle, seed=5)
    epoch = tf.Variable(0, dtype=tf.int64)
    dataset = own.dataset(data, epoch)
    assert int(dataset.cardinality()) == division.steps

    def read(number):
        epoch.assign(number)
        return list(dataset)

    return read


def test_an_epoch_begins_where_the_epoch_before_it_ended():
    """With any number of steps: the batches of all epochs are the same sequence."""
    data = Arrays.of(np.arange(11))

    def epochs(steps, count):
        read = reader(data, 2, 1, 2, True, steps)
        return [batch.numpy().tolist() for n in range(count) for batch in read(n)]

    whole = epochs(None, 8)
    for steps in range(1, 8):
        assert epochs(steps, 3) == whole[: 3 * steps]


def test_a_rank_without_a_row_gets_a_copy_that_does_not_count():
    """Of 7 rows in global batches of 6, the last one has a row for the first rank."""
    data, rows = Arrays.of(np.arange(7)), []
    for rank in range(3):
        division = divided(7, 2, 3)
        assert division.has_empty_parts and division.steps == 2
        own = RowOrder(division, rank, shuffle=True, seed=5, is_marked=True)
        batches = list(own.dataset(data, tf.Variable(0, dtype=tf.int64)))
        assert [int(mark[0]) for _, mark in batches] == [1, int(rank == 0)]
        assert all(len(batch) for batch, _ in batches)
        rows += [row for batch, mark in batches if mark[0] for row in batch.numpy()]
    assert sorted(rows) == list(range(7))


def test_arrays_are_distinguished_from_batches():
    """Arrays, tensors and structures of them, and nothing else."""
    x = np.zeros((3, 2))
    for data in (x, tf.constant(x), {"a": x, "b": [x, x]}, (x, None, x)):
        assert is_arrays(data)
    dataset = tf.data.Dataset.from_tensors(x)
    for data in (
        None,
        dataset,
        iter([x]),
        "text",
        [1.0, 2.0],
        tf.ragged.constant([[1]]),
    ):
        assert not is_arrays(data)


def test_arrays_of_different_lengths_are_refused():
    """The error names their shapes."""
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4,\)"):
        Arrays.of(np.zeros((3, 2)), np.zeros(4))


def test_the_validation_split_is_the_end_of_the_rows():
    """As in Keras; an empty part is an error."""
    data = Arrays.of(np.arange(10), np.arange(10))
    training, validation = data.split(0.3)
    assert training.x.tolist() == list(range(7)) and validation.y.tolist() == [7, 8, 9]
    for fraction in (0.95, 1.0):
        with pytest.raises(ValueError, match=f"validation_split={fraction}"):
            data.split(fraction)
