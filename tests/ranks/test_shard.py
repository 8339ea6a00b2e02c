"""Data that each rank divides before it is decoded; the oracle is plain Keras."""

import itertools
import re
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    raises_everywhere,
    shortened,
    slow_on_three,
)
from harness.data_kinds import kept, slices

import keras_dist

pytestmark = pytest.mark.several_ranks
BATCH = 5

# That data has ended is no warning, nor are rows that are left out.
never_runs_out = pytest.mark.filterwarnings("error:Your input ran out of data")


class Decoder:
    """What a `map` does for each row; it counts the rows."""

    def __init__(self):
        self.count = 0

    def _decode(self, x):
        self.count += 1
        return 2 * x

    def __call__(self, x, *others):
        decoded = tf.numpy_function(self._decode, [x], tf.float32)
        return tf.ensure_shape(decoded, x.shape), *others

    def of_all_ranks(self):
        """Rows decoded on all ranks, since the last call."""
        count, self.count = self.count, 0
        return sum(keras_dist.gather(count))


KINDS = {
    "by row": lambda x, y: slices((x, y)),
    "of unknown length": lambda x, y: slices((x, y)).filter(kept),
    "weighted": lambda x, y: slices((x, y, np.ones(len(y), "float32"))),
}


def divided(kind, x, y, decoder):
    """Data of a kind that is divided by row."""
    data = KINDS[kind](x, y).apply(keras_dist.shard(BATCH))
    return data.map(decoder).batch(BATCH).prefetch(1)


@never_runs_out
@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("kind", "count"),
    shortened(
        itertools.product(KINDS, (91, 96)),
        quick=[("of unknown length", 91)],
    ),
)
def test_divided_data_trains_as_one_process(rows, make_model, kind, count):
    """Weights and metrics, the last batch and validation too; each row decoded once.

    Of 91 rows fewer than there are ranks are left for the last global batch.
    """
    x, y = (array[:count] for array in rows)
    decoder = Decoder()

    def data(_):
        validation = divided(kind, x[:32], y[:32], Decoder())
        return {"x": divided(kind, x, y, decoder), "validation_data": validation}

    def plain_data(rows):
        validation = 2 * x[:32], y[:32]
        return {"x": 2 * x, "y": y, "batch_size": rows, "validation_data": validation}

    assert_equals_one_process(make_model, data, BATCH, plain_data=plain_data, epochs=2)
    assert decoder.of_all_ranks() <= 2 * count


@slow_on_three
def test_divided_data_is_evaluated_and_predicted(rows, make_model):
    """All rows; each rank predicts its own. Fewer rows than ranks are an error."""
    x, y = rows
    model = make_model()
    many = keras_dist.DistributedModel(model)
    decoder = Decoder()
    for count in (32, 28):
        expected = model.evaluate(2 * x[:count], y[:count], verbose=0)
        predicted = model.predict(2 * x[:count], verbose=0)
        for kind in KINDS:
            numbers = slices(np.arange(count))
            if kind == "of unknown length":
                numbers = numbers.filter(lambda number: number >= 0)
            own = [int(number) for number in numbers.apply(keras_dist.shard(BATCH))]
            assert sorted(sum(keras_dist.gather(own), [])) == list(range(count))
            data = divided(kind, x[:count], y[:count], decoder)
            found = many.evaluate(data, verbose=0)
            assert found == pytest.approx(expected, abs=1e-6), kind
            found = many.predict(data, verbose=0, gather=False)
            assert found == pytest.approx(predicted[own], abs=1e-6), kind
    for kind in KINDS:
        data = divided(kind, x[:1], y[:1], decoder)
        few = "at least one row of validation data"
        raises_everywhere(ValueError, partial(many.evaluate, data), few)
        raises_everywhere(ValueError, partial(many.predict, data), "are not gathered")


def test_random_maps_are_no_error_and_nothing_is_compared(
    world, rows, make_model, capsys
):
    """Pictures that are augmented at random, on every rank in another way."""
    x, y = rows
    decoder = Decoder()
    generator = np.random.default_rng(world.rank)

    def augment(x):
        return (x + generator.normal(size=x.shape, scale=1e-3)).astype("float32")

    def random_map(x, y):
        x = tf.numpy_function(augment, [x], tf.float32)
        return tf.ensure_shape(x, (5,)), y

    data = tf.data.Dataset.from_tensor_slices((x, y)).apply(keras_dist.shard(BATCH))
    data = data.map(decoder).map(random_map).batch(BATCH)
    model = make_model()
    keras_dist.dist_fit(model, data, verbose=2)
    assert_equal_to_the_bit(model)
    assert decoder.of_all_ranks() == len(x)
    printed = " ".join(re.findall(r"[^│╭╰\s]+", capsys.readouterr().out))
    assert ("sharded before decoding, by row" in printed) == (world.rank == 0)


@pytest.mark.three_ranks
def test_files_belong_to_a_rank_each(world, make_model, capsys):
    """A rank that has no more rows takes part without rows, until no rank has any."""
    names = tf.data.Dataset.range(7).shuffle(7, seed=3)  # of 5 rows each
    seen = []

    class Recording(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            seen.extend(x.numpy()[:, 0].astype(int).tolist())
            return self.dense(x)

    model = Recording()
    model.compile("sgd", "mse", run_eagerly=True)
    files = names.apply(keras_dist.shard())
    rows = files.interleave(lambda n: tf.data.Dataset.range(5 * n, 5 * n + 5))
    data = rows.map(lambda n: ([tf.cast(n, tf.float32)], [0.0])).batch(5)
    keras_dist.dist_fit(model, data, verbose=2, lr_scaling=1e-6)
    assert_equal_to_the_bit(model)
    trained = sum(keras_dist.gather(seen), [])
    assert set(trained) == set(range(35))
    if world.rank == 0:
        assert "sharded before decoding, by row" in capsys.readouterr().out


@never_runs_out
def test_what_cannot_be_divided_is_an_error_on_all_ranks(world, rows, make_model):
    """Other data on a rank, other seeds, no seed, divided twice, few rows, repeated."""
    x, y = rows
    data = tf.data.Dataset.from_tensor_slices((x, y))
    shard = keras_dist.shard(BATCH)

    def divided(source, finish=lambda rows: rows):
        return finish(source.apply(shard)).batch(BATCH)

    other = tf.data.Dataset.from_tensor_slices((x + world.rank, y))
    few = 50 if world.rank else 20
    for make, text in (
        (lambda: divided(other), "the first elements before `shard`"),
        (lambda: divided(data.shuffle(9, seed=world.rank)), "the seeds of shuffles"),
        (lambda: divided(data.take(1)), "at least one row"),
        (lambda: divided(data.take(50 + world.rank)), "how `shard` divides"),
        (lambda: divided(data) if world.rank else data.batch(5), "how `shard` divides"),
        (lambda: divided(data.take(7), lambda r: r.repeat()), "repeated after it was"),
        (lambda: divided(data, lambda r: r.take(few)), "different numbers"),
        (lambda: divided(data.apply(shard)), "already divided"),
        (lambda: tf.data.Dataset.zip((divided(data), data)), "divided alike"),
        (lambda: divided(unseeded(data)), "without a seed before `shard`"),
    ):
        steps = {"steps_per_epoch": 4} if "repeated" in text else {}

        def train(make=make, steps=steps):
            keras_dist.dist_fit(make_model(), make(), verbose=0, **steps)

        raises_everywhere(ValueError, train, text)


def unseeded(data):
    """Shuffled in a process that has set no seed."""
    tf.random.set_seed(None)
    try:
        return data.shuffle(9)
    finally:
        tf.random.set_seed(7)
