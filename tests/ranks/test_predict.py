"""Predictions of many ranks equal one process, in the order of the rows."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import raises_everywhere, shortened
from harness.data_kinds import BATCHES

import keras_dist


class Nested(keras.Model):
    """Takes a dict of a list, and gives many kinds of outputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, inputs):
        x, (y, names) = inputs["x"], inputs["others"]
        return {
            "scores": self.dense(x),
            "parts": [keras.ops.cast(y * 3, "int64"), (x > 0, keras.ops.sum(x, 1))],
            "names": tf.strings.join([names, "!"]),
        }


def inputs_of(count):
    """Rows that all differ."""
    x = np.random.default_rng(2).normal(size=(count, 4)).astype("float32")
    names = np.array([f"row {index}" for index in range(count)])
    return {"x": x, "others": [np.arange(count, dtype="int32"), tf.constant(names)]}


def assert_same(given, expected):
    """The same structure, dtypes and values."""
    keras.tree.assert_same_structure(given, expected)
    pairs = zip(keras.tree.flatten(given), keras.tree.flatten(expected), strict=True)
    for own, other in pairs:
        assert type(own) is type(other) and own.dtype == other.dtype
        assert own.shape == other.shape
        if own.dtype.kind == "f":
            assert own == pytest.approx(other, abs=1e-6)
        else:
            assert (own == other).all()


@pytest.mark.three_ranks
def test_predictions_are_those_of_one_process(world):
    """Any structure and dtype, ragged rows, fewer rows than ranks, `gather`."""
    model = Nested()
    many = keras_dist.DistributedModel(model)
    for count, options in (
        (101, {"batch_size": 8}),
        (1, {}),
        (2, {}),
        (3, {"batch_size": 1}),
        (101, {"batch_size": 8, "steps": 3}),
        (101, {"steps": 4}),
    ):
        data = inputs_of(count)
        # Keras cannot slice a tensor of strings, so the oracle gets batches.
        plain = tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(data))
        size = options.get("batch_size", 26 if options else 32)
        steps = options.get("steps")
        expected = model.predict(plain.batch(size), steps=steps, verbose=0)
        given = many.predict(data, verbose=0, **options)
        assert_same(given, expected)
        own = many.predict(data, verbose=0, gather=False, **options)
        batch = np.arange(len(expected["scores"])) // size
        part = batch % world.size == world.rank
        assert_same(
            own, keras.tree.map_structure(lambda leaf, p=part: leaf[p], expected)
        )


def test_data_that_is_already_split_is_predicted_by_its_rank(
    world, rows, make_model, capsys
):
    """And the first rank alone prints and writes."""
    x, _ = rows
    model = make_model()
    expected = model.predict(x, verbose=0)
    many = keras_dist.DistributedModel(model)
    own = tf.data.Dataset.from_tensor_slices(x[world.rank :]).batch(16)
    assert_same(many.predict(own, verbose=0), expected[world.rank :])
    split = keras_dist.DistributedModel(model, shard="none")
    assert_same(split.predict(x[world.rank :], verbose=0), expected[world.rank :])

    class Counts(keras.callbacks.Callback):
        rows = 0

        def on_predict_batch_end(self, batch, logs=None):
            self.rows += len(logs["outputs"])

    counts, logger = Counts(), keras.callbacks.CSVLogger("/dev/null")
    capsys.readouterr()
    given = many.predict(x, 16, verbose=2, callbacks=[counts, logger])
    assert_same(given, expected)
    assert keras_dist.sum(counts.rows) == len(x)
    assert (logger.model is None) == (world.rank > 0)
    assert bool(capsys.readouterr().out) == (world.rank == 0)


class Ragged(keras.Model):
    """Gives a ragged output, and others under nested names."""

    def call(self, x):
        lengths = tf.cast(x[:, 0] > 0, tf.int32) + 1
        return {
            "words": tf.RaggedTensor.from_tensor(x, lengths=lengths),
            "sums": [keras.ops.sum(x, 1)],
        }


def dataset(x):
    """Rows in batches of eight; the last one is smaller."""
    return tf.data.Dataset.from_tensor_slices(x).batch(8)


def unknown(x, y, batch_size):
    """Rows without targets, in batches of unknown number."""
    return dataset(x).filter(lambda rows: True)


KINDS = {name: BATCHES[name] for name in ("batched", "sequence", "filtered batches")}
KINDS |= {"generator": BATCHES["generator"], "rows alone": unknown}


@pytest.mark.three_ranks
@pytest.mark.parametrize("kind", shortened(KINDS, {"rows alone"}))
def test_batches_are_predicted_in_turns_and_gathered_in_order(world, kind):
    """By any kind of data and `steps`; on all ranks, on the first one, or on none."""
    x = np.random.default_rng(0).normal(size=(53, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.set_weights(keras_dist.broadcast(model.get_weights()))
    many = keras_dist.DistributedModel(model)
    data = partial(KINDS[kind], x, np.zeros(53), 8)
    for steps in (3, 1, None):
        # With `steps` Keras itself predicts whole executions of a graph.
        model.compile(steps_per_execution=1 if steps else 2)
        expected = model.predict(data(), steps=steps, verbose=0)
        options = {"steps": steps, "verbose": 0}
        assert_same(many.predict(data(), **options), expected)
        first = many.predict(data(), gather="first", **options)
        if world.rank == 0:
            assert_same(first, expected)
        else:
            assert first is None
        own = many.predict(data(), gather=False, **options)
        batches = np.split(expected, range(8, len(expected), 8))
        parts = [expected[:0], *batches[world.rank :: world.size]]
        assert_same(own, np.concatenate(parts))
    assert model.steps_per_execution == 2


@pytest.mark.several_ranks
def test_ragged_outputs_come_in_the_order_of_the_rows():
    """From a few batches, too."""
    x = np.random.default_rng(0).normal(size=(53, 4)).astype("float32")
    model = Ragged()
    many = keras_dist.DistributedModel(model)
    for count in (53, 8):
        data = dataset(x[:count])
        expected = model.predict(data, verbose=0)
        given = many.predict(data, verbose=0)
        assert given["words"].to_list() == expected["words"].to_list()
        assert_same(given["sums"], expected["sums"])


@pytest.mark.several_ranks
def test_unusable_inputs_of_predict_are_errors_on_all_ranks(world, rows, make_model):
    """No rows, other rows, other weights, another `gather` with any kind of data."""
    x, _ = rows
    model = make_model()
    keras.utils.set_random_seed(world.rank)
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    divided = tf.data.Dataset.from_tensor_slices(x).apply(keras_dist.shard(4)).batch(4)
    for net, data, text, *gather in (
        (model, x[:0], "or to predict"),
        (model, x[: 50 + world.rank], "the shapes of the rows"),
        (model, x[:, :4] if world.rank else x, "the shapes of the rows"),
        (other, x, "the weights"),
        *((model, each, "`gather`", "first") for each in (x, dataset(x), divided)),
        *((model, each, "`gather`", "all") for each in (x, dataset(x), divided)),
    ):
        how = {"gather": gather[0]} if gather and world.rank == 0 else {}
        call = partial(keras_dist.DistributedModel(net).predict, data, **how)
        raises_everywhere(ValueError, partial(call, verbose=0), text, "Received: ")
