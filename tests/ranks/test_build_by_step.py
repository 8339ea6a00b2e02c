"""A model is built from what its train step does, before the first step."""

import random
import types
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    largest_difference,
    raises_everywhere,
    shortened,
)
from harness.models import Stepping, make_compiled, update
from keras import ops

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]


class Diffusion(Stepping):
    """The step calls a network inside, with noisy rows and times."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(3)])

    def call(self, x):
        return self.network(x)

    def loss_of(self, data):
        x = data[0]
        time = ops.mean(x, axis=1, keepdims=True)
        noise = ops.sin(17 * x)
        made = self.network(ops.concatenate([x + time * noise, time], axis=1))
        return ops.mean(ops.square(made - noise))


class Lazy(keras.Model):
    """The step makes a layer, a metric and a second optimizer when it first runs."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.is_made = False

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        if not self.is_made:
            self.is_made = True
            self.head = keras.layers.Dense(2)
            self.of_head = keras.optimizers.Adam(0.01)
            self.error = keras.metrics.MeanAbsoluteError(name="error")
        with tf.GradientTape(persistent=True) as tape:
            predicted = self.head(self(x))
            loss = ops.mean(ops.square(predicted - y))
        for used, layer in ((self.optimizer, self.inner), (self.of_head, self.head)):
            weights = layer.trainable_variables
            used.apply(tape.gradient(loss, weights), weights)
        self.error.update_state(y, predicted)
        return {"loss": loss, "error": self.error.result()}


class OwnMetrics(keras.Model):
    """Compiled loss and metrics see other targets than the batch has."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        right = ops.argmax(ops.concatenate([y, ops.flip(y, axis=1)], axis=1)[:, :3], 1)
        with tf.GradientTape() as tape:
            predicted = self(x[:, 1:])
            loss = self.compute_loss(y=right, y_pred=predicted)
        update(tape, loss, self.optimizer, self)
        return self.compute_metrics(x, right, predicted)


class Counting(Diffusion):
    """The step counts its runs in a weight, and has a metric; it may read values."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads
        self.drawn = []
        self.seen = keras.metrics.Mean(name="seen")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        raise NotImplementedError("nobody calls it")

    def train_step(self, data):
        if self.reads:
            assert data[0].numpy().any()
        self.drawn.append((random.random(), np.random.random()))
        self.count.assign_add(1)
        logs = super().train_step(data)
        self.seen.update_state(self.count)
        return {**logs, "seen": self.seen.result()}


class Compiled(Diffusion):
    """The step is a function of TensorFlow, which keeps its traces."""

    train_step = tf.function(Diffusion.train_step)


class Nested(keras.Model):
    """The step trains a compiled model inside, by the step of that one."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(3, "tanh")])
        self.inner.add(keras.layers.Dense(2))
        self.inner.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        self.outer = keras.layers.Dense(2)

    def call(self, x):
        return self.outer(self.inner(x))

    def train_step(self, data):
        x, y = data
        made = ops.concatenate([x, x * x], axis=1)
        logs = self.inner.train_step((made, y))
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(made) - y))
        update(tape, loss, self.optimizer, self.outer)
        return {"loss": loss, **{f"inner {name}": logs[name] for name in logs}}


class OwnFunction(Diffusion):
    """A `make_train_function` of its own."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            self.train_function = tf.function(
                lambda it: self.train_step(next(it)), autograph=False
            )
        return self.train_function


class LossBuilds(keras.Model):
    """Keras's own step; `compute_loss` calls a layer that nothing else calls."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.head = keras.layers.Dense(2)

    def call(self, x):
        # Keras's symbolic call has no values.
        return ops.convert_to_tensor(tf.raw_ops.Identity(input=self.inner(x)))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(self.head(y_pred) - y))


class Reads(keras.Sequential):
    """An eager step that reads values, with a metric that is not built yet.

    The metric calls functions of TensorFlow, which are no part of the step.
    """

    def __init__(self):
        super().__init__([keras.layers.Dense(2, activation="sigmoid")])

    def train_step(self, data):
        assert np.isfinite(data[0].numpy()).all()
        return super().train_step(data)


class WithoutStep(Diffusion):
    """The train function does not call `train_step`."""

    def make_train_function(self, force=False):
        @tf.function
        def train_function(iterator):
            return Diffusion.train_step(self, next(iterator))

        self.train_function = train_function
        return train_function


def make_data():
    generator = np.random.default_rng(2)
    return generator.normal(size=(24, 3)), generator.normal(size=(24, 2))


def make(kind, seed=4, **compiled):
    """A compiled model of a kind."""
    if kind is LossBuilds:
        compiled["loss"] = "mse"
    if kind is OwnMetrics:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled |= {"loss": loss, "metrics": ["accuracy"]}
    if kind is Reads:
        auc = keras.metrics.AUC(multi_label=True, name="auc")
        compiled |= {"loss": "mse", "metrics": [auc]}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return make_compiled(kind, optimizer, seed=seed, **compiled)


def fit(model, **arguments):
    """Train on all ranks for two epochs, in the order of the rows."""
    given = {"batch_size": 4, "shuffle": False, "epochs": 2, "verbose": 0}
    given |= {"lr_scaling": "none"}
    keras_dist.dist_fit(model, *make_data(), **(given | arguments))


def equals_one_process(world, kind, **compiled):
    """Train on all ranks, from other weights on the others than on the first."""
    model, *_ = assert_equals_one_process(
        lambda: make(kind, 4 + world.rank, **compiled),
        make_data(),
        4,
        epochs=2,
        tolerance=1e-10,
        options={"callbacks": [keras_dist.ReplicaCheck()]},
    )
    return model


# Models, how they are compiled, and which of them `make test` tries; in a graph, which
# is traced once more to build, without one, in which a step may read values, and by
# XLA, which keeps no trace in which gradients are recorded and not averaged.
HOW = {
    "in a graph": (
        {},
        [Diffusion, Lazy, OwnMetrics, Compiled, Nested, OwnFunction, LossBuilds],
        {Lazy, OwnMetrics},
    ),
    "eagerly": ({"run_eagerly": True}, [Lazy, OwnMetrics, Reads], set()),
    "with XLA": ({"jit_compile": True}, [Compiled], set()),
}


def runs():
    """One of them on three ranks, too."""
    for how, (options, kinds, quick) in HOW.items():
        for kind in kinds:
            is_on_three = kind is OwnMetrics and not options
            marks = [pytest.mark.three_ranks] if is_on_three else []
            marks += [] if kind in quick else [pytest.mark.long]
            title = f"{kind.__name__} {how}"
            yield pytest.param(kind, options, marks=marks, id=title)


@pytest.mark.parametrize(("kind", "options"), runs())
def test_a_step_that_calls_something_else_equals_one_process(world, kind, options):
    """Networks, layers, models inside, functions of TensorFlow, Keras's own step."""
    equals_one_process(world, kind, **options)


@pytest.mark.parametrize(
    ("is_eager", "reads"),
    shortened([(False, False), (True, False), (True, True)], {(True, True)}),
)
def test_building_leaves_no_trace(world, is_eager, reads):
    """Weights that a step assigns, metrics, and the random numbers of Python.

    A second fit builds nothing again.
    """
    model = equals_one_process(world, lambda: Counting(reads), run_eagerly=is_eager)
    steps = 2 * 24 // (4 * world.size)
    assert float(model.count) == steps
    if is_eager:
        # Once to build the model, and three times in the trial.
        assert len(model.drawn) == steps + 4
        assert model.drawn[0] == model.drawn[1] == model.drawn[4]
        fit(model)
        assert len(model.drawn) == 2 * steps + 4


class SeesFunctions(Stepping):
    """Notes whether functions of TensorFlow run eagerly, in the whole process."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def train_step(self, data):
        self.seen.append(tf.config.functions_run_eagerly())
        return super().train_step(data)

    @tf.function
    def loss_of(self, data):
        x, y = data
        return ops.mean((self.dense(x) - y) ** 2)


def test_building_changes_nothing_for_other_threads(world):
    """Data that a thread loads meanwhile goes on in its functions."""
    x = np.ones((16, 3), "float32")
    model = SeesFunctions()
    model.compile("sgd")
    keras_dist.dist_fit(model, x, x[:, :1], batch_size=8, verbose=0)
    assert len(model.seen) > 1 and not any(model.seen)
    assert_equal_to_the_bit(model)


@pytest.mark.parametrize("is_loop", [False, True])
def test_callbacks_of_a_users_own_fit_or_loop_do_the_same(world, is_loop):
    """`model.fit` with `BroadcastVariables`, or `train_on_batch` with it."""

    def fit(model, *data, batch_size, **given):
        keras_dist.DistributedOptimizer(model.optimizer)
        own = [keras_dist.BroadcastVariables()]
        data = [array[world.rank :: world.size] for array in data]
        if not is_loop:
            return model.fit(*data, batch_size=batch_size, callbacks=own, **given)
        loop = keras.callbacks.CallbackList(own, add_history=True, model=model)
        loop.on_train_begin()
        for start in range(0, len(data[0]), batch_size):
            model.train_on_batch(*(a[start : start + batch_size] for a in data))
        loop.on_train_end()
        return model.history

    how = {"fit": fit, "tolerance": 1e-10, "logs": ()}
    make_one = partial(make, Diffusion, 4 + world.rank)
    assert_equals_one_process(make_one, make_data(), 12 // world.size, **how)


def test_a_second_optimizer_is_restored_though_nothing_was_built(folder):
    """A training that goes on from a checkpoint equals one that was not ended."""
    fit(expected := make(Lazy, run_eagerly=True))
    fit(make(Lazy, run_eagerly=True), epochs=1, resume=folder)
    for _ in range(2):  # the second one is finished: it builds, and makes no step
        fit(model := make(Lazy, 9, run_eagerly=True), resume=folder)
        assert largest_difference(model, expected) <= 1e-10


@pytest.mark.parametrize("is_on_object", [False, True])
def test_a_step_that_is_not_of_the_class_is_an_error(world, is_on_object):
    """No rank trains on with weights of its own."""

    model = make(Diffusion if is_on_object else WithoutStep, world.rank)
    if is_on_object:
        model.train_step = types.MethodType(Diffusion.train_step, model)
    kind = "that was set on the object" if is_on_object else "make_train_function"
    texts = "without the `train_step`", kind
    raises_everywhere(RuntimeError, lambda: fit(model), *texts)
