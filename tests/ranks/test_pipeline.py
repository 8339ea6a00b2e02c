"""Passes over data end with their last batch: TensorFlow does not tune them."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import shortened
from harness.data_kinds import BATCHES, Sequence

import keras_dist

pytestmark = pytest.mark.several_ranks
X = np.arange(48, dtype=np.float32).reshape(24, 2) / 48
Y = X.sum(axis=1, keepdims=True)


def in_batches(is_tuned=None):
    """The rows as a `tf.data.Dataset`."""
    options = tf.data.Options()
    if is_tuned is not None:
        options.autotune.enabled = is_tuned
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).with_options(options)


@pytest.fixture
def model():
    """A compiled linear model."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


# Looks at batches are kept of a shuffle, whose next pass has another order, and of a
# cache, which they would cut short; of batches of unknown number nothing says where
# they are.
KINDS = ["batched", "shuffled", "batches cached", "filtered, cached"]


@pytest.mark.parametrize("kind", shortened(KINDS, {"batches cached"}))
def test_no_iterator_over_data_is_tuned(model, folder, monkeypatch, kind):
    """Those that look at it and that remember where they are, as Keras's do."""
    began, found = tf.data.Dataset.__iter__, []

    def begin(dataset):
        found.append(dataset.options().autotune.enabled)
        return began(dataset)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", begin)
    for epochs in (1, 2):
        data = BATCHES[kind](X, Y, 4)
        options = {"resume": str(folder), "validation_data": data, "verbose": 0}
        keras_dist.dist_fit(model, data, epochs=epochs, **options)
    many = keras_dist.DistributedModel(model)
    many.evaluate(X, Y, verbose=0)
    many.predict(Sequence(X, Y, [4]), verbose=0)
    assert set(found) == {False}


def test_tuning_that_the_user_requests_is_on(model, monkeypatch):
    """Options of the user's data set remain, and the model is plain again."""
    read = []

    def record(_, dataset, options=None):
        read.append(dataset.options().autotune.enabled)
        return dataset

    strategy = tf.distribute.get_strategy()
    method = "experimental_distribute_dataset"
    monkeypatch.delattr(strategy, method)  # see conftest.py
    monkeypatch.setattr(type(strategy), method, record)
    many = keras_dist.DistributedModel(model, shard="none")
    many.evaluate(in_batches(is_tuned=True), verbose=0)
    model.evaluate(X, Y, verbose=0)
    assert read == [True, None]


def no_autograph(x, y):
    """A function of the user's."""
    return x, y


def names_in(paths, pattern):
    """Names that a pattern finds in files."""
    texts = [Path(path).read_text() for path in paths]
    return set(re.findall(pattern, "\n".join(texts)))


def test_functions_of_this_package_are_not_translated(model):
    """AutoGraph would need longer for them than all else before a first step."""
    old = set(sys.modules)
    many = keras_dist.DistributedModel(model)
    many.fit(X, Y, batch_size=4, validation_data=in_batches(), verbose=0)
    many.fit(in_batches().cache(), verbose=0)
    decoded = tf.data.Dataset.from_tensor_slices((X, Y)).apply(keras_dist.shard(4))
    many.fit(decoded.map(no_autograph).batch(4), verbose=0)
    new = [name for name in sys.modules if "autograph_gen" in name and name not in old]
    modules = [sys.modules[name] for name in new]
    translated = names_in([each.__file__ for each in modules], r"def tf__(\w+)")
    own = names_in(Path(keras_dist.__file__).parent.rglob("*.py"), r"def (\w+)")
    own.add("lam")  # AutoGraph's name of a lambda
    assert "no_autograph" in translated
    assert not translated & own
