"""Data without targets: train and test steps get what Keras gives, of any kind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, models_in

import keras_dist

pytestmark = pytest.mark.several_ranks

ROWS = 26  # with batches of 4: the last ones are fewer, and one of them is smaller


class Sequence(keras.utils.PyDataset):
    """Batches as `wrap` makes them."""

    def __init__(self, arrays, batch_size, wrap):
        super().__init__()
        self.arrays, self.batch_size, self.wrap = arrays, batch_size, wrap

    @property
    def num_batches(self):
        return -(-ROWS // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.wrap(self.arrays["a"][rows], self.arrays["b"][rows])


class Autoencoder(keras.Model):
    """Trains on all that it is given, and keeps the structure of that."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self.mean = keras.metrics.Mean(name="mean")
        self.structures = {}

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.layer(x)

    def loss_of(self, data, name):
        self.structures[name] = structure_of(data)
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        losses = keras.ops.stack([mean_of_rows(self(x) - x) for x in leaves])
        self.mean.update_state(losses, tf.shape(leaves[0])[0])
        return keras.ops.mean(losses)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data, "train")
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"mean": self.mean.result()}

    def test_step(self, data):
        self.loss_of(data, "test")
        return {"mean": self.mean.result()}

    @property
    def metrics(self):
        return [self.mean]


def mean_of_rows(values):
    return keras.ops.mean(keras.ops.square(values))


def structure_of(data):
    """Types of the containers around the leaves, and the shapes of rows."""
    if isinstance(data, dict):
        return {name: structure_of(value) for name, value in sorted(data.items())}
    if isinstance(data, (list, tuple)):
        return type(data)(map(structure_of, data))
    return None if data is None else tuple(data.shape)[1:]


def alone(a, _):
    return a


def tuple_of_one(a, _):
    return (a,)


def pair_in_tuple(a, b):
    return ((a, b),)


def as_dict(a, b):
    return {"first": a, "second": b}


def dict_in_tuple(a, b):
    return (as_dict(a, b),)


def listed(a, b):
    return [a, b]


def dataset(wrap):
    return lambda arrays, size: tf.data.Dataset.from_tensor_slices(
        wrap(arrays["a"], arrays["b"])
    ).batch(size)


def filtered(wrap):
    return lambda arrays, size: dataset(wrap)(arrays, size).filter(
        lambda *_: tf.constant(True)
    )


def sequence(wrap):
    return lambda arrays, size: Sequence(arrays, size, wrap)


def generator(wrap):
    def make(arrays, size):
        batches = Sequence(arrays, size, wrap)
        return (batches[index] for index in range(batches.num_batches))

    return make


def arrays(wrap):
    return lambda arrays, _: wrap(arrays["a"], arrays["b"])


KINDS = {
    "arrays": (arrays, [alone, as_dict, listed]),
    "data set": (dataset, [alone, tuple_of_one, pair_in_tuple, as_dict, dict_in_tuple]),
    "filtered": (filtered, [alone, tuple_of_one]),
    "sequence": (sequence, [alone, tuple_of_one, pair_in_tuple]),
    "generator": (generator, [tuple_of_one, dict_in_tuple]),
}
LONG = {"arrays-as_dict", "sequence-pair_in_tuple", "generator-dict_in_tuple"}
LONG |= {"sequence-alone", "data set-pair_in_tuple", "data set-as_dict"}
LONG |= {"data set-alone", "filtered-tuple_of_one"}
CASES = [
    pytest.param(kind(wrap), id=name, marks=[pytest.mark.long] if name in LONG else [])
    for title, (kind, wraps) in KINDS.items()
    for wrap in wraps
    for name in [f"{title}-{wrap.__name__}"]
]


@pytest.fixture(autouse=True)
def in_float64():
    """Rounding hides no error."""
    with models_in("float64"):
        yield


def trained(make, fit, size, validation_size=4, **arguments):
    generator = np.random.default_rng(1)
    named = {name: generator.normal(size=(ROWS, 3)) for name in ("a", "b")}
    keras.utils.set_random_seed(5)
    model = Autoencoder()
    model(np.zeros((1, 3)))
    model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    x = make(named, size)
    if hasattr(x, "shape") or isinstance(x, (dict, list)):
        arguments["batch_size"] = size
    validation = make(named, validation_size)
    if isinstance(validation, list):
        validation = (validation,)
    history = fit(
        model, x, validation_data=validation, verbose=0, shuffle=False, **arguments
    )
    return model, history.history


@pytest.mark.parametrize("make", CASES)
def test_steps_get_the_structure_that_keras_gives(world, make):
    """The same containers in the train and the test step, the same weights and logs."""
    expected, logs = trained(make, keras.Model.fit, 4 * world.size)
    model, own_logs = trained(make, keras_dist.dist_fit, 4, lr_scaling="none")
    assert model.structures == expected.structures
    for own, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-10)
    for name in ("mean", "val_mean"):
        np.testing.assert_allclose(own_logs[name], logs[name], rtol=0, atol=1e-10)
    assert_equal_to_the_bit(model)


def test_evaluate_gives_two_inputs_without_targets_to_one_step(world):
    """`DistributedModel.evaluate` takes a list for the inputs, not for `(x, y)`."""
    generator = np.random.default_rng(1)
    inputs = [generator.normal(size=(ROWS, 3)) for _ in range(2)]
    model = Autoencoder()
    model(np.zeros((1, 3)))
    model.compile("sgd", run_eagerly=True)
    expected = model.evaluate(inputs, verbose=0, return_dict=True)
    own = keras_dist.DistributedModel(model).evaluate(
        inputs, verbose=0, return_dict=True
    )
    assert model.structures == {"test": (((3,), (3,)),)}
    assert own["mean"] == pytest.approx(expected["mean"], abs=1e-10)
