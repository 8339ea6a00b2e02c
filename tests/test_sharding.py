"""Which rows each rank reads: every small case, against one process."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.sharding import arrays, arrays_rows, arrays_schedule
from keras_dist.sharding.arrays_order import Order

CASES = list(itertools.product(range(1, 5), range(1, 6), range(1, 40)))


def rows_of_batch(step, num_rows, *, batch_size, rank, size):
    """Places, in the order of a pass, of the rows that `rank` reads at `step`."""
    used = num_rows - arrays_rows.left_out_rows(
        num_rows, batch_size=batch_size, size=size
    )
    start = step * batch_size * size
    return range(start + rank, min(start + batch_size * size, used), size)


def test_every_row_belongs_to_exactly_one_rank():
    """Shards are disjoint and cover everything."""
    for size in range(1, 8):
        for num_rows in range(50):
            sharded = [
                row
                for rank in range(size)
                for row in range(num_rows)[
                    arrays_rows.shard_rows(num_rows, rank=rank, size=size)
                ]
            ]
            assert sorted(sharded) == list(range(num_rows))


def test_ranks_read_the_batches_of_one_process():
    """Interleaved, a step of all ranks is one global batch in its own order."""
    for size, batch_size, num_rows in CASES:
        if num_rows < size:
            continue
        left_out = arrays_rows.left_out_rows(num_rows, batch_size=batch_size, size=size)
        assert 0 <= left_out < size
        read, counts = [], [0] * size
        for step in range(
            arrays_rows.steps_of_rows(num_rows, batch_size=batch_size, size=size)
        ):
            own = [
                rows_of_batch(
                    step, num_rows, batch_size=batch_size, rank=rank, size=size
                )
                for rank in range(size)
            ]
            assert all(1 <= len(part) <= batch_size for part in own)
            together = sorted(row for part in own for row in part)
            assert together == list(range(together[0], together[0] + len(together)))
            read += together
            counts = [
                count + len(part) for count, part in zip(counts, own, strict=True)
            ]
        assert read == list(range(num_rows - left_out))
        assert counts == [
            arrays_rows.rows_of_rank(
                num_rows, batch_size=batch_size, rank=rank, size=size
            )
            for rank in range(size)
        ]


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_the_data_set_deals_what_the_arithmetic_says(shuffle):
    """Pass after pass; each row once a pass; the order independent of the size."""
    num_rows, batches = 23, {}
    data = arrays.as_arrays(np.arange(num_rows), np.arange(num_rows) * 2.0)
    for size, batch_size in ((1, 6), (2, 3), (3, 2)):
        passes = []
        steps = arrays_rows.steps_of_rows(num_rows, batch_size=batch_size, size=size)
        for number in range(2):
            order = []
            parts_of_steps = zip(
                *(
                    read(data, batch_size, rank, size, shuffle, steps, number)
                    for rank in range(size)
                ),
                strict=True,
            )
            for step, parts in enumerate(parts_of_steps):
                together = [None] * sum(len(part[0]) for part in parts)
                for rank, (x, y) in enumerate(parts):
                    together[rank::size] = x.numpy().tolist()
                    assert (y.numpy() == 2 * x.numpy()).all()
                    assert y.dtype == tf.float32
                assert len(parts[0][0]) <= batch_size
                order += together
                if shuffle == "batch":
                    first = step * 6
                    assert sorted(together) == list(range(first, first + len(together)))
            assert sorted(order) == list(range(num_rows))
            passes.append(order)
        batches[size] = passes
        assert (passes[0] == passes[1]) == (shuffle is False)
    assert batches[1] == batches[2] == batches[3]


def read(data, batch_size, rank, size, shuffle, steps, number):
    """The batches of one rank in one epoch."""
    sizes = {"num_rows": data.num_rows, "batch_size": batch_size, "size": size}
    sharded = Order(
        arrays_schedule.epoch_schedule_of(None, steps=steps, **sizes),
        rank,
        shuffle=shuffle,
        seed=5,
    )
    epoch = tf.Variable(number, dtype=tf.int64)
    dataset = arrays.shard_training(data, sharded, epoch=epoch)
    assert int(dataset.cardinality()) == steps
    batches = list(dataset)
    for step, batch in enumerate(batches):
        known = sharded.rows_at(number, step)
        assert (batch[0].numpy() == data.x[known]).all()
    return batches


def test_epochs_shorter_and_longer_than_a_pass_go_on_where_they_ended():
    """Any number of steps an epoch cuts the same stream of passes."""
    data = arrays.as_arrays(np.arange(11))
    in_a_pass = arrays_rows.steps_of_rows(11, batch_size=2, size=2)
    whole = [
        batch[0].numpy().tolist()
        for number in range(8)
        for batch in read(data, 2, 1, 2, True, in_a_pass, number)
    ]
    for steps in range(1, 8):
        cut = [
            batch[0].numpy().tolist()
            for number in range(3)
            for batch in read(data, 2, 1, 2, True, steps, number)
        ]
        assert cut == whole[: 3 * steps]


def test_a_tail_smaller_than_the_ranks_is_left_out_and_changes():
    """Other rows each epoch, when they are shuffled."""
    data = arrays.as_arrays(np.arange(7))
    first = {
        tuple(read(data, 2, 0, 3, True, 1, number)[0][0].numpy().tolist())
        for number in range(12)
    }
    assert all(len(batch) == 2 for batch in first) and len(first) > 3


def test_arrays_are_told_from_streams():
    """Arrays, tensors and structures of them, and nothing else."""
    x = np.zeros((3, 2))
    for data in (x, tf.constant(x), {"a": x, "b": [x, x]}, (x, None, x)):
        assert arrays.is_arrays(data)
    dataset = tf.data.Dataset.from_tensors(x)
    for data in (
        None,
        dataset,
        iter([x]),
        "text",
        [1.0, 2.0],
        tf.ragged.constant([[1]]),
    ):
        assert not arrays.is_arrays(data)


def test_arrays_of_different_lengths_are_refused():
    """By their shapes."""
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4,\)"):
        arrays.as_arrays(np.zeros((3, 2)), np.zeros(4))


def test_the_validation_split_is_the_end_of_the_rows():
    """As in Keras; an empty part is an error."""
    data = arrays.as_arrays(np.arange(10), np.arange(10))
    training, validation = arrays.split_validation(data, 0.3)
    assert training.x.tolist() == list(range(7)) and validation.y.tolist() == [7, 8, 9]
    for fraction in (0.95, 1.0):
        with pytest.raises(ValueError, match=f"validation_split={fraction}"):
            arrays.split_validation(data, fraction)
