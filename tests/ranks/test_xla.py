"""`jit_compile=True`: the same weights, and one warning if XLA cannot compile it."""

import keras
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    raises_everywhere,
    warned,
)
from harness.models import make_compiled

import keras_dist

pytestmark = pytest.mark.several_ranks


def train_by_xla(x, y, *layers, kind=keras.Sequential, loss="mse"):
    """A model with these layers that all ranks have trained."""

    def make():
        return kind([keras.Input((5,)), *layers, keras.layers.Dense(1)])

    model = make_compiled(make, "sgd", loss, jit_compile=True)
    keras_dist.dist_fit(model, x, y, batch_size=8, shuffle=False, verbose=0)
    return model


class Uncompilable(keras.layers.Layer):
    """A layer of an operation that XLA does not have."""

    def call(self, x):
        return tf.strings.to_number(tf.strings.as_string(x)) * 0 + x

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class TwoUpdates(keras.Model):
    """Like a GAN: two optimizers, the second update computed after the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(1)
        self.other = keras.optimizers.Adam(0.01)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        for layer, optimizer in (
            (self.first, self.optimizer),
            (self.second, self.other),
        ):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x)[:, 0] - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class ResetsRates(keras.callbacks.Callback):
    """Ends with the rates of the ranks, which a fit scales, on one process, too."""

    def on_train_end(self, logs=None):
        self.model.optimizer.learning_rate = self.model.other.learning_rate = 0.01


def test_a_model_that_xla_cannot_compile_trains_without(world, rows):
    """It trains without XLA, with one warning on the first rank."""
    with warned("without XLA") as lines:
        model = train_by_xla(*rows, Uncompilable())
    assert len(lines) == (world.rank == 0)
    assert all("XLA cannot compile this model" in line for line in lines)
    assert_equal_to_the_bit(model)
    assert model.jit_compile


class Sees(keras.layers.Layer):
    """Notes in which graph it is traced."""

    def call(self, x):
        self.graphs.append(tf.compat.v1.get_default_graph().name)
        return x


def test_the_step_that_trains_is_the_one_that_xla_compiles(rows):
    """It is traced last, and by the function that XLA compiles, not beside it."""
    sees = Sees()
    object.__setattr__(sees, "graphs", [])
    train_by_xla(*rows, sees)
    assert sees.graphs[-1].startswith("_record")


class ChangesItsBatch(keras.Sequential):
    """Takes its targets out of the dict that it is given."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """The loss of one of them."""
        y["other"] = y.pop("own")
        return keras.ops.mean((y["other"] - y_pred[:, 0]) ** 2)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_step_may_change_the_dicts_of_its_batch(rows):
    """In parts, too: a `tf.function` would be an error, and XLA left out."""
    x, y = rows
    model = train_by_xla(x, {"own": y}, kind=ChangesItsBatch, loss=None)
    assert_equal_to_the_bit(model)


class SeesPolicy(keras.Sequential):
    """Notes the dtype policy, and how Keras names a layer that its step makes."""

    seen, names = set(), []

    def train_step(self, data):
        name = keras.layers.Dense(1, name=None).name
        self.seen.add((keras.config.dtype_policy().name, name.split("_")[0]))
        self.names.append(name)
        return super().train_step(data)


def test_a_step_that_is_compiled_in_parts_has_the_state_of_keras(rows):
    """XLA's first part is traced in another thread; Keras has a state for each."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = train_by_xla(*rows, kind=SeesPolicy)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.seen == {("mixed_bfloat16", "dense")}
    assert len(set(model.names)) == len(model.names) > 1


class Scaled(keras.optimizers.SGD):
    """Its update has a factor, which the train step computes."""

    def apply(self, grads, trainable_variables=None, factor=1.0):
        super().apply([factor * gradient for gradient in grads], trainable_variables)


class PassesFactor(keras.Sequential):
    """Such a train step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x)[:, 0] - y) ** 2)
        weights = self.trainable_variables
        factor = 0.5 * tf.ones_like(loss)
        self.optimizer.apply(tape.gradient(loss, weights), weights, factor=factor)
        return {"loss": loss}


def test_an_update_that_needs_more_than_gradients_runs_without_xla(world, rows):
    """A tensor of the first part is not there in the second one."""

    def make():
        return PassesFactor([keras.Input((5,)), keras.layers.Dense(1)])

    with warned("its update needs more than gradients") as lines:
        assert_equals_one_process(
            lambda: make_compiled(make, Scaled(0.1), jit_compile=True),
            tuple(array[:96] for array in rows),
            batch="global",
        )
    assert len(lines) == (world.rank == 0)


def test_a_collective_that_xla_should_compile_is_an_error(rows):
    """Outside of a fit of ours nothing is around it that could be compiled alone."""
    x, y = (array[:8] for array in rows)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "mse")
    model.jit_compile = True  # `compile` of keras_dist.horovod turns it off

    def train():
        model.train_on_batch(x, y)

    raises_everywhere(RuntimeError, train, "XLA cannot compile a collective")


@pytest.mark.filterwarnings("ignore:Training without XLA")
def test_two_optimizers_in_one_step_equal_one_process(world, rows):
    """Each averages; also if XLA cannot compile the step in two parts."""
    x, y = (array[:96] for array in rows)

    def make(rate=0.01):
        model = make_compiled(TwoUpdates, keras.optimizers.SGD(rate), jit_compile=True)
        model(x[:1])
        model.optimizer.build(model.first.trainable_variables)
        model.other.build(model.second.trainable_variables)
        model.other.learning_rate = rate
        return model

    given = {"plain_make": lambda: make(0.01 * world.size), "logs": ()}
    given |= {"options": {"lr_scaling": "linear"}, "callbacks": [ResetsRates()]}
    assert_equals_one_process(make, (x, y), **given)
