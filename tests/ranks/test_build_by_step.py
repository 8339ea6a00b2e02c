"""A model is built from what its train step does, before the first step."""

import random
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, distribute_jobs, raises_everywhere
from keras import ops

import keras_dist
from keras_dist.optimizer import optimizers_of

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]


class Stepping(keras.Model):
    """A train step that differentiates a loss, by one optimizer."""

    def loss_of(self, data):
        """The loss, a mean over rows."""
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


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


class Lazy(Stepping):
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
            self.of_head = keras.optimizers.Adam(self.optimizer.rate_of_head)
            self.error = keras.metrics.MeanAbsoluteError(name="error")
        with tf.GradientTape(persistent=True) as tape:
            predicted = self.head(self(x))
            loss = ops.mean(ops.square(predicted - y))
        for used, layer in ((self.optimizer, self.inner), (self.of_head, self.head)):
            weights = layer.trainable_variables
            used.apply(tape.gradient(loss, weights), weights)
        self.error.update_state(y, predicted)
        return {"loss": loss, "error": self.error.result()}


class OwnMetrics(Stepping):
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
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
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


class Nested(Stepping):
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
        weights = self.outer.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
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


def trained(fit, kind, size, seed=4, is_eager=False, xla=False, **arguments):
    """A model after two epochs; `size` ranks in one."""
    keras.utils.set_random_seed(seed)
    model = kind()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.rate_of_head = 0.01
    compiled = {"jit_compile": True} if xla else {}
    if kind is LossBuilds:
        compiled = {"loss": "mse"}
    if kind is OwnMetrics:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled = {"loss": loss, "metrics": ["accuracy"]}
    model.compile(optimizer, run_eagerly=is_eager, **compiled)
    given = {"batch_size": 4 * size, "shuffle": False, "epochs": 2, "verbose": 0}
    history = fit(model, *make_data(), **(given | arguments))
    return model, history.history


def assert_same(own, expected):
    """The weights and the state of all optimizers of two models, in float64."""
    expected = expected if isinstance(expected, list) else _state(expected)
    for mine, its in zip(_state(own), expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-10)


def _state(model):
    variables = list(model.weights)
    for found in optimizers_of(model):
        variables += found.variables
    return [ops.convert_to_numpy(variable) for variable in variables]


def equals_one_process(world, kind, **arguments):
    """Train on all ranks, from other weights on the others than on the first."""

    def train_plainly():
        model, logs = trained(keras.Model.fit, kind, world.size, **arguments)
        return _state(model), logs

    [(expected, logs)] = distribute_jobs([train_plainly])
    model, own_logs = trained(
        keras_dist.dist_fit,
        kind,
        1,
        seed=4 + world.rank,
        lr_scaling="none",
        callbacks=[keras_dist.ReplicaCheck()],
        **arguments,
    )
    assert_same(model, expected)
    assert_equal_to_the_bit(model)
    for name, values in logs.items():
        np.testing.assert_allclose(own_logs[name], values, rtol=0, atol=1e-10)
    return model


# Models, how they are compiled, and which of them `make test` tries; in a graph, which
# is traced once more to build, without one, in which a step may read values, and by
# XLA, which keeps no trace in which gradients are recorded and not averaged.
HOW = {
    "in a graph": (
        {},
        [Diffusion, Lazy, OwnMetrics, Compiled, Nested, OwnFunction, LossBuilds],
        {Lazy, OwnMetrics, Nested, Compiled},
    ),
    "eagerly": ({"is_eager": True}, [Lazy, OwnMetrics], {Lazy}),
    "with XLA": ({"xla": True}, [Compiled], {Compiled}),
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


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_building_leaves_no_trace(world, is_eager, reads):
    """Weights that a step assigns, metrics, and the random numbers of Python."""
    if reads and not is_eager:
        return
    model = equals_one_process(world, lambda: Counting(reads), is_eager=is_eager)
    steps = 2 * 24 // (4 * world.size)
    assert float(model.count) == steps
    if is_eager:
        # Once to build the model, and three times in the trial.
        assert len(model.drawn) == steps + 4
        assert model.drawn[0] == model.drawn[1] == model.drawn[4]


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


def test_a_second_fit_builds_nothing_again(world):
    """Its step is run as on one process."""
    models = []
    for fit, size in ((keras.Model.fit, world.size), (keras_dist.dist_fit, 1)):
        options = {} if fit is keras.Model.fit else {"lr_scaling": "none"}
        model, _ = trained(fit, lambda: Counting(True), size, is_eager=True, **options)
        calls = len(model.drawn)
        given = {"batch_size": 4 * size, "shuffle": False, "verbose": 0}
        fit(model, *make_data(), **given, **options)
        assert len(model.drawn) - calls == 24 // (4 * world.size)
        models.append(model)
    assert_same(models[1], models[0])


@pytest.mark.parametrize("is_loop", [False, True])
def test_callbacks_of_a_users_own_fit_or_loop_do_the_same(world, is_loop):
    """`model.fit` with `BroadcastVariables`, or `train_on_batch` with it."""
    x, y = make_data()
    models = []
    for is_ours in (False, True):
        rank, size = (world.rank, world.size) if is_ours else (0, 1)
        keras.utils.set_random_seed(4 + rank)
        model = Diffusion()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if is_ours:
            optimizer = keras_dist.DistributedOptimizer(optimizer)
        model.compile(optimizer)
        own = [keras_dist.BroadcastVariables()] if is_ours else []
        mine = x[rank::size], y[rank::size]
        if is_loop:
            loop = keras.callbacks.CallbackList(own, model=model)
            loop.on_train_begin()
            for start in range(0, len(mine[0]), 12 // size):
                model.train_on_batch(*(a[start : start + 12 // size] for a in mine))
            loop.on_train_end()
        else:
            given = {"batch_size": 12 // size, "shuffle": False, "verbose": 0}
            model.fit(*mine, callbacks=own, **given)
        models.append(model)
    assert_same(models[1], models[0])


def test_a_second_optimizer_is_restored_though_nothing_was_built(world, tmp_path):
    """A training that goes on from a checkpoint equals one that was not ended."""
    folder = keras_dist.broadcast(str(tmp_path))
    common = {"size": 1, "lr_scaling": "none", "is_eager": True}
    expected, _ = trained(keras_dist.dist_fit, Lazy, **common)
    trained(keras_dist.dist_fit, Lazy, epochs=1, resume=folder, **common)
    model, _ = trained(keras_dist.dist_fit, Lazy, seed=9, resume=folder, **common)
    assert_same(model, expected)


@pytest.mark.parametrize("is_on_object", [False, True])
def test_a_step_that_is_not_of_the_class_is_an_error(world, is_on_object):
    """No rank trains on with weights of its own."""

    def make():
        if not is_on_object:
            return WithoutStep()
        model = Diffusion()
        model.train_step = types.MethodType(Diffusion.train_step, model)
        return model

    def fit():
        trained(keras_dist.dist_fit, make, 1, seed=world.rank)

    messages = raises_everywhere(RuntimeError, fit)
    kind = "that was set on the object" if is_on_object else "make_train_function"
    assert all("without the `train_step`" in text and kind in text for text in messages)
