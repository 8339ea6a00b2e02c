"""Data that is not `(x, y)`: train and test steps get what Keras gives, of any kind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened
from harness.data_kinds import kept, slices
from harness.models import Stepping, make_compiled

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

ROWS = 26  # with batches of 4: the last ones are fewer, and one of them is smaller


class Numbered(keras.utils.PyDataset):
    """Batches of a list, of which `num_batches` alone tells the number."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    @property
    def num_batches(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


class Autoencoder(Stepping):
    """Trains on all that it is given, and keeps the structure of that."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(3)
        self.mean = keras.metrics.Mean(name="mean")
        self.structures = {}
        self(np.zeros((1, 3)))

    def call(self, x):
        return self.layer(x)

    def loss_of(self, data, name="train"):
        self.structures[name] = structure_of(data)
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        losses = keras.ops.stack([mean_of_rows(self(x) - x) for x in leaves])
        self.mean.update_state(losses, tf.shape(leaves[0])[0])
        return keras.ops.mean(losses)

    def report(self, loss):
        return {"mean": self.mean.result()}

    def test_step(self, data):
        return self.report(self.loss_of(data, "test"))

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


WRAPS = {
    "alone": lambda a, b: a,
    "tuple of one": lambda a, b: (a,),
    "pair in tuple": lambda a, b: ((a, b),),
    "dict": lambda a, b: {"first": a, "second": b},
    "dict in tuple": lambda a, b: ({"first": a, "second": b},),
    "list": lambda a, b: [a, b],
    "four": lambda a, b: (a, b, a + b, a - b),
}


def in_batches(x, size):
    """A list of batches of some structure of arrays."""
    ends = range(0, ROWS, size)
    cut = [slice(end, end + size) for end in ends]
    return [keras.tree.map_structure(lambda array, r=r: array[r], x) for r in cut]


KINDS = {
    "arrays": lambda x, size: x,
    "data set": lambda x, size: slices(x).batch(size),
    "filtered": lambda x, size: slices(x).batch(size).filter(kept),
    "sequence": lambda x, size: Numbered(in_batches(x, size)),
    "generator": lambda x, size: (batch for batch in in_batches(x, size)),
}
QUICK = {
    ("arrays", "alone"),
    ("data set", "four"),
    ("generator", "tuple of one"),
}
CASES = QUICK | {
    ("arrays", "list"),
    ("data set", "dict in tuple"),
    ("arrays", "dict"),
    ("data set", "alone"),
    ("filtered", "tuple of one"),
    ("sequence", "pair in tuple"),
}


@pytest.mark.parametrize(("kind", "wrap"), shortened(sorted(CASES), QUICK))
def test_steps_get_the_structure_that_keras_gives(kind, wrap):
    """The same containers in the train and the test step, the same weights and logs."""
    rows = WRAPS[wrap](*np.random.default_rng(1).normal(size=(2, ROWS, 3)))
    models = []

    def make():
        optimizer = keras.optimizers.SGD(0.1)
        models.append(make_compiled(Autoencoder, optimizer, run_eagerly=True))
        return models[-1]

    def data(size):
        validation = KINDS[kind](rows, 4)
        if isinstance(validation, list):
            validation = (validation,)
        given = {"x": KINDS[kind](rows, size), "validation_data": validation}
        return given | ({"batch_size": size} if kind == "arrays" else {})

    assert_equals_one_process(make, data, 4, tolerance=1e-10)
    structures = keras_dist.gather([repr(model.structures) for model in models])
    assert len(set(sum(structures, []))) == 1


def test_evaluate_gives_two_inputs_without_targets_to_one_step(world):
    """`DistributedModel.evaluate` takes a list for the inputs, not for `(x, y)`."""
    generator = np.random.default_rng(1)
    inputs = [generator.normal(size=(ROWS, 3)) for _ in range(2)]
    model = make_compiled(Autoencoder, "sgd", run_eagerly=True)
    expected = model.evaluate(inputs, verbose=0, return_dict=True)
    own = keras_dist.DistributedModel(model).evaluate(
        inputs, verbose=0, return_dict=True
    )
    assert model.structures == {"test": (((3,), (3,)),)}
    assert own["mean"] == pytest.approx(expected["mean"], abs=1e-10)


class Shapeless(Autoencoder):
    """Knows the shape of its rows, which the data set does not."""

    def loss_of(self, data, name="train"):
        return super().loss_of(tf.reshape(data, (-1, 3)), name)


def test_tensors_of_unknown_rank_are_divided_by_row():
    """As `tf.numpy_function` returns them."""
    x = np.random.default_rng(1).normal(size=(ROWS, 3))

    def forget(rows):
        return tf.numpy_function(np.copy, [rows], tf.float64)

    def data(size):
        validation = slices(x).batch(4).map(forget)
        return {"x": slices(x).batch(size).map(forget), "validation_data": validation}

    def make():
        return make_compiled(Shapeless, keras.optimizers.SGD(0.1))

    assert_equals_one_process(make, data, 8, batch="global", tolerance=1e-10)
