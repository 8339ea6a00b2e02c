"""Predictions of many ranks are those of one process, in the order of the rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import raises_everywhere

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
        part = slice(world.rank, None, world.size)
        assert_same(
            own, keras.tree.map_structure(lambda leaf, p=part: leaf[p], expected)
        )


def test_data_in_batches_is_predicted_by_every_rank(world, rows, make_model, capsys):
    """And data that is already split; the first rank alone prints and writes."""
    x, _ = rows
    model = make_model()
    expected = model.predict(x, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(16)
    many = keras_dist.DistributedModel(model)
    assert_same(many.predict(dataset, verbose=0), expected)
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


@pytest.mark.several_ranks
def test_unusable_inputs_of_predict_are_errors_on_all_ranks(world, rows, make_model):
    """No rows, other rows, other weights, and outputs that are not one a row."""
    x, _ = rows
    model = make_model()
    keras.utils.set_random_seed(world.rank)
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    sums = keras.Sequential(
        [keras.Input((5,)), keras.layers.Lambda(lambda x: keras.ops.reshape(x, [-1]))]
    )
    for net, data, text in (
        (model, x[:0], "nothing to predict"),
        (model, x[: 50 + world.rank], "the number of rows"),
        (model, x[:, :4] if world.rank else x, "the shapes of the rows"),
        (other, x, "the weights"),
        (sums, x, "one shape for each row"),
    ):
        many = keras_dist.DistributedModel(net)
        call = (lambda many=many, data=data: many.predict(data, verbose=0),)
        for message in raises_everywhere(ValueError, *call):
            assert text in message and "Received: " in message
