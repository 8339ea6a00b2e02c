"""State that no gradient changes: counters and statistics."""

import keras
import pytest
from claims import assert_equal_to_the_bit
from models import vectors

import keras_dist

pytestmark = pytest.mark.several_ranks


class Counters(keras.layers.Layer):
    """Counts rows and steps, with each rule for state without a gradient."""

    def build(self, shape):
        def add(dtype, aggregation):
            return self.add_weight(
                shape=(),
                dtype=dtype,
                initializer="zeros",
                trainable=False,
                aggregation=aggregation,
            )

        self.rows = add("int64", "sum")
        self.total = add("float32", "sum")
        self.steps = add("int64", "mean")
        self.first = add("float32", "only_first_replica")
        self.built = True

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        self.total.assign_add(keras.ops.sum(x))
        self.steps.assign_add(1)
        self.first.assign(float(keras_dist.rank()) + 1.0)
        return x


@pytest.mark.three_ranks
def test_state_without_a_gradient_follows_its_own_rule(world):
    """`aggregation`: rows are summed over the ranks, steps are not."""
    x, y = vectors(48)
    counters = Counters()
    model = keras.Sequential([keras.Input((5,)), counters, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    before = [int(counters.rows), float(counters.total), int(counters.steps)]
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=2, verbose=0)
    assert_equal_to_the_bit(model)
    assert int(counters.rows) - before[0] == 2 * 48
    added = float(counters.total) - before[1]
    assert added == pytest.approx(2 * float(x.sum()), rel=1e-4)
    assert int(counters.steps) - before[2] == 2 * (48 // (8 * world.size))
    assert float(counters.first) == 1.0


def test_what_was_adapted_before_keeps_its_bits(world):
    """A `Normalization` layer is the same before and after."""
    x, y = vectors(48)
    layer = keras.layers.Normalization()
    layer.adapt(x)
    before = [weight.numpy() for weight in layer.weights]
    model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    keras_dist.dist_fit(model, x, y, batch_size=8, verbose=0)
    for weight, old in zip(layer.weights, before, strict=True):
        assert (weight.numpy() == old).all()
