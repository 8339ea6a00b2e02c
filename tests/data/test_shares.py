"""Shares of a batch: bounds, rows and how they follow the ranks' speeds."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data.round_robin import own_rows
from keras_dist.data.shares import UNITS, Shares, adjusted, first_row


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_row_is_one_ranks_and_every_rank_has_one(size):
    """Of batches of any length; with all rows for one rank, too; in graphs, too."""
    generator = np.random.default_rng(size)
    for shares in ([1] * size, [1e6, *[1] * (size - 1)], generator.uniform(size=size)):
        bounds = (Shares.of(list(shares), size) or Shares.equal(size, UNITS)).bounds
        for length in (1, 2, size, size + 1, 40, 97):
            begins = [first_row(rank, length, bounds) for rank in range(size + 1)]
            assert begins[0] == 0 and begins[-1] == length
            rows = np.diff(begins)
            assert rows.min() >= (length >= size) and rows.max() <= length
            assert (rows >= 1).sum() >= min(length, size)
            tensors = tf.constant(length), tf.constant(bounds, tf.int64)
            of_graph = [int(first_row(r, *tensors)) for r in range(size + 1)]
            assert of_graph == begins


def test_rows_of_batches_with_bounds_in_a_variable():
    """Known and unknown lengths, ragged rows, and tensors of different lengths."""
    bounds = tf.Variable([0, 3, 4], dtype=tf.int64)
    x = tf.reshape(tf.range(8), [8, 1])
    ragged = tf.ragged.constant([[1], [2, 3], [4], [], [5], [6], [7], [8]])

    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.int32)])
    def of_unknown(x):
        return own_rows((x, None), 1, 2, bounds.read_value())

    (rows, _), counts = of_unknown(x)
    assert rows.numpy().ravel().tolist() == [6, 7] and bool(counts)
    bounds.assign([0, 1, 4])
    (rows, _), counts = of_unknown(x)
    assert rows.numpy().ravel().tolist() == [2, 3, 4, 5, 6, 7]
    (rows, _), counts = of_unknown(x[:1])
    assert len(rows) == 1 and not bool(counts)
    found, counts = own_rows((x, ragged), 1, 2, bounds.read_value())
    assert found[1].to_list() == [[4], [], [5], [6], [7], [8]] and bool(counts)
    found, counts = own_rows((x, x[:3]), 1, 2, bounds.read_value())
    assert len(found[0]) == 8 and not bool(counts)


@pytest.mark.parametrize("speeds", [[1, 2], [3, 1, 1], [1, 1, 1, 8], [1, 0.01]])
@pytest.mark.parametrize("overhead", [0.0, 1.0])
def test_shares_follow_the_speeds_and_stay_there(speeds, overhead):
    """With seconds that do not depend on rows, too; a rank that recovers gets more."""
    size, batch = len(speeds), 512
    bounds = Shares.equal(size, batch).bounds
    for now in (speeds, [1] * size, speeds[::-1]):
        for _ in range(60):
            seconds = [
                overhead + rows / (100 * speed)
                for rows, speed in zip(np.diff(bounds), now, strict=True)
            ]
            before, bounds = bounds, adjusted(bounds, seconds)
        assert before == bounds, "it ends"
        assert sum(np.diff(bounds)) == batch and np.diff(bounds).min() >= 1
        if min(np.diff(bounds)) > 1:
            assert max(seconds) <= 1.08 * np.mean(seconds)


def test_bounds_move_in_steps_of_rows_where_shapes_are_compiled():
    """And stay where times are unknown."""
    assert adjusted((0, 48, 96), [1.0, 1.7], quantum=8) == (0, 64, 96)
    assert adjusted((0, 48, 96), [1.0, 1e9], quantum=8) == (0, 88, 96)
    assert adjusted((0, 3, 6), [1.0, 1e9], quantum=8) == (0, 5, 6)
    for unknown in (0.0, float("nan")):
        assert adjusted((0, 48, 96), [1.0, unknown]) == (0, 48, 96)
