"""Models that preprocess rows in their `fit`, and lists in place of arrays."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened
from harness.models import make_compiled

import keras_dist

WORDS = ["what", "it", "the", "ranks", "waits", "sums", "a", "rank", "is", "read"]


class Preprocesses(keras.Model):
    """As KerasHub's models: `fit` maps `preprocess_samples` over batches of strings."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 3))

    def call(self, x):
        return self.dense(x)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        lengths = tf.strings.length(x)
        columns = [lengths, lengths**2, lengths % 2]
        features = tf.cast(tf.stack(columns, axis=1), "float32") / 10.0
        return keras.utils.pack_x_y_sample_weight(features, y, sample_weight)

    def _mapped(self, x, y, sample_weight, batch_size):
        if not isinstance(x, tf.data.Dataset):
            pieces = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
            x = tf.data.Dataset.from_tensor_slices(pieces).batch(batch_size or 32)
        return x.map(self.preprocess_samples)

    def fit(
        self, x, y=None, batch_size=None, sample_weight=None, validation_data=None, **kw
    ):
        if validation_data is not None:
            if not isinstance(validation_data, tuple):
                validation_data = (validation_data,)
            pieces = keras.utils.unpack_x_y_sample_weight(validation_data)
            kw["validation_data"] = self._mapped(*pieces, batch_size)
        return super().fit(self._mapped(x, y, sample_weight, batch_size), **kw)

    def evaluate(self, x=None, y=None, batch_size=None, sample_weight=None, **kw):
        if not kw.get("_use_cached_eval_dataset"):
            x, y = self._mapped(x, y, sample_weight, batch_size), None
        return super().evaluate(x, y, **kw)

    def predict(self, x, batch_size=None, **kw):
        return super().predict(self._mapped(x, None, None, batch_size), **kw)


def compiled():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    how = {"metrics": ["accuracy"]}
    return make_compiled(Preprocesses, keras.optimizers.SGD(0.1), loss, **how)


@pytest.mark.parametrize(
    ("kind", "batch"),
    shortened(
        itertools.product(["lists", "dataset"], ["global", "rank"]),
        {("lists", "global")},
    ),
)
def test_a_model_may_preprocess_rows_in_fit(kind, batch):
    """With nine rows in batches of four, not every rank has one of the last batch."""
    words = WORDS[:9] if batch == "global" else WORDS
    labels = [len(word) % 2 for word in words]
    data, given, how = (words, labels), (words, labels), {"batch_size": 4}
    validation = words[:5], labels[:5]
    if kind == "dataset":
        data = tf.data.Dataset.from_tensor_slices(given).batch
        given, how, validation = (data(4),), {}, data(4)
    fitted = {"epochs": 2, "validation_data": validation}
    model, *_ = assert_equals_one_process(compiled, data, 4, batch=batch, **fitted)
    parallel = keras_dist.DistributedModel(model, batch="global")
    for name, taken in (("evaluate", given), ("predict", given[:1])):
        found, wanted = (
            getattr(each, name)(*taken, verbose=0, **how) for each in (parallel, model)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_list_of_four_inputs_is_data():
    """Keras takes a list of any number of arrays as the inputs of a model."""

    def make():
        inputs = [keras.Input((3,)) for _ in range(4)]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(inputs))
        return keras.Model(inputs, output)

    def compiled():
        return make_compiled(make, keras.optimizers.SGD(0.1), "mse", run_eagerly=True)

    x = list(np.random.default_rng(0).normal(size=(4, 11, 3)).astype("float32"))
    assert_equals_one_process(compiled, (x, x[0][:, :1]), 5, batch="global")
