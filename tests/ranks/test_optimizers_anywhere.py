"""Optimizers of a custom train step are averaged wherever the model keeps them."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_close,
    assert_equal_to_the_bit,
    assert_equals_one_process,
    shortened,
)
from harness.models import make_compiled

import keras_dist
from keras_dist.optimizer.attach import is_distributed
from keras_dist.optimizer.nested import leaves, optimizers_of

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(2)
DATA = RANDOM.normal(size=(24, 3)), RANDOM.normal(size=(24, 1))


@dataclasses.dataclass
class Pair:
    """A helper of the user's own."""

    generator: object
    critics: list


@dataclasses.dataclass(slots=True)
class WithSlots:
    """Another one, without a `__dict__`."""

    inner: object


class InLayer(keras.layers.Layer):
    """A layer of the user's own that keeps optimizers."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept


class Wrapping(keras.optimizers.SGD):
    """An optimizer of the user's own, which updates by another one inside."""

    def __init__(self, inner):
        super().__init__(inner.learning_rate.numpy())
        self.inside = inner

    def apply(self, grads, trainable_variables=None, factor=1):
        grads = [factor * gradient for gradient in grads]
        self.inside.apply(grads, trainable_variables)


class Passing(keras.optimizers.SGD):
    """Another one, which passes its own rate on: no `apply` of the inner one runs."""

    def __init__(self, inner):
        super().__init__(inner.learning_rate.numpy())
        inner.learning_rate = 9.0
        self.inside = [inner]

    def update_step(self, gradient, variable, learning_rate):
        self.inside[0].update_step(gradient, variable, learning_rate)


class Gan(keras.Model):
    """Two networks, two optimizers; several steps of the critic for one."""

    def __init__(self):
        super().__init__()
        self.generator = keras.layers.Dense(3)
        self.critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def build(self, shape):
        self.generator.build(shape)

    def call(self, x):
        return self.critic(self.generator(x))

    def optimizers(self):
        """The optimizer of the generator and that of the critic."""
        return self.get(self)

    def train_step(self, data):
        x, y = data
        of_generator, of_critic = self.optimizers()
        for _ in range(2):
            with tf.GradientTape() as tape:
                score = self.critic(self.generator(x)) - self.critic(x)
                loss = keras.ops.mean(keras.ops.square(score - y))
            weights = self.critic.trainable_weights
            of_critic.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        weights = self.generator.trainable_weights
        more = {"factor": 2} if isinstance(of_generator, Wrapping) else {}
        of_generator.apply(tape.gradient(loss, weights), weights, **more)
        return {"loss": loss}


def in_object(model, one, two):
    model.held = Pair(one, [two])
    return lambda model: (model.held.generator, model.held.critics[0])


def in_layer(model, one, two):
    model.held = WithSlots(InLayer({"both": [one, two]}))
    return lambda model: model.held.inner.kept["both"]


def of_inner_model(model, one, two):
    model.critic.compile(two)
    model.held = one
    return lambda model: (model.held, model.critic.optimizer)


def of_wrappers(model, one, two):
    passing = Passing(two)
    two.build(model.critic.trainable_variables)
    model.held = [Wrapping(one), passing]
    return lambda model: model.held


def of_wrappers_and_model(model, one, two):
    model.inside = one
    return of_wrappers(model, one, two)


def of_function(model, one, two):
    # Keras has it from 3.14 on.
    multi = getattr(keras.optimizers, "MultiOptimizer", lambda choose: choose(None))
    model.held = [one, multi(lambda variable: two)]
    return lambda model: model.held


def trained(fit, hold, rate, batch_size, is_eager=True, **arguments):
    keras.utils.set_random_seed(4)
    model = Gan()
    model(DATA[0][:1])
    one = keras.optimizers.SGD(rate, momentum=0.9)
    two = keras.optimizers.Adam(rate / 10)
    object.__setattr__(model, "get", hold(model, one, two))
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=is_eager)
    given = {"batch_size": batch_size, "shuffle": False, "epochs": 2, "verbose": 0}
    history = fit(model, *DATA, **given, **arguments)
    return model, history.history


@pytest.mark.parametrize(
    ("hold", "is_eager"),
    shortened(
        [(in_object, True), (in_layer, False), (of_inner_model, True)]
        # Inside of an optimizer of the user's own, which is given the averages.
        + [(of_wrappers, True), (of_wrappers_and_model, True)],
        [(in_object, True), (of_wrappers_and_model, True)],
    ),
)
def test_optimizers_are_averaged_wherever_they_are(world, hold, is_eager):
    """Weights and state equal one process, at the scaled rate; then all are plain."""
    size = world.size
    expected, logs = trained(keras.Model.fit, hold, 0.1 * size, 4 * size, is_eager)
    check = keras_dist.ReplicaCheck()
    model, own_logs = trained(
        keras_dist.dist_fit, hold, 0.1, 4, is_eager, callbacks=[check]
    )
    assert_close(own_logs["loss"], logs["loss"], 1e-10)  # two: nothing was ended
    assert_close(model.get_weights(), expected.get_weights(), 1e-10)
    assert len(optimizers_of(model)) >= 3
    assert not any(map(is_distributed, optimizers_of(model)))
    for own, other in zip(model.optimizers(), expected.optimizers(), strict=True):
        assert_close(own.variables[2:], other.variables[2:], 1e-10)
        assert type(own).apply is type(other).apply
        assert type(own) is own.__class__
    assert_equal_to_the_bit(model)


def test_the_warmup_callback_scales_all_of_them(world):
    """In `model.fit`, also those in a `MultiOptimizer` that is not built before."""

    def fit(model, x, y, **given):
        for optimizer in optimizers_of(model):
            keras_dist.DistributedOptimizer(optimizer)
        own = (array[world.rank :: world.size] for array in (x, y))
        warmup = keras_dist.LearningRateWarmup(0)
        callbacks = [warmup, keras_dist.BroadcastVariables()]
        return model.fit(*own, callbacks=callbacks, **given)

    size = world.size
    expected, _ = trained(keras.Model.fit, of_function, 0.1 * size, 4 * size, False)
    model, _ = trained(fit, of_function, 0.1, 4, False)
    assert_close(model.get_weights(), expected.get_weights(), 1e-10)


class Clips(keras.optimizers.SGD):
    """Clips in the outermost method that a class of a user's overrides."""

    def clip(self, grads):
        """The norm of all gradients of the global batch."""
        return tf.clip_by_global_norm(grads, 0.3)[0]


class ClipsPairs(Clips):
    """Keras calls this method first."""

    def apply_gradients(self, grads_and_vars, **more):
        grads, variables = zip(*grads_and_vars, strict=True)
        pairs = zip(self.clip(grads), variables, strict=True)
        return super().apply_gradients(pairs, **more)


class ClipsGradients(Clips):
    """Then this one."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(self.clip(grads), trainable_variables)


class ClipsBoth(ClipsPairs, ClipsGradients):
    """Averages once."""


class ClipsLate(Clips):
    """After Keras has added up the gradients of several batches."""

    def _clip_gradients(self, grads):
        return super()._clip_gradients(self.clip(grads))

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(tf.clip_by_norm(gradient, 0.2), variable, learning_rate)


class Delegates(keras.optimizers.SGD):
    """Updates by another one inside, at its rate."""

    def __init__(self, inner):
        super().__init__(9.0)
        self.inside = inner

    def apply_gradients(self, grads_and_vars):
        self.inside.apply_gradients(grads_and_vars)


CLIPS = [
    (kind, accumulated, compiled)
    for kind in (ClipsPairs, ClipsGradients, ClipsBoth, ClipsLate)
    for accumulated in (None, 2)
    for compiled in ({"run_eagerly": True}, {"jit_compile": True})
]
QUICK = [(0, 0), (0, 3), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("kind", "accumulated", "compiled"),
    shortened(CLIPS, [CLIPS[4 * kind + way] for kind, way in QUICK]),
)
def test_what_an_optimizer_changes_is_the_average(world, kind, accumulated, compiled):
    """The ranks average before the outermost method that is not Keras's, and once."""

    def make():
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        optimizer = kind(0.1, gradient_accumulation_steps=accumulated)
        model.compile(optimizer, "mse", **compiled)
        return model

    errors = DATA[1] * np.linspace(0.1, 9, 24)[:, None]
    how = {"epochs": 2, "batch": "global", "tolerance": 1e-10, "factor": 2}
    how["options"] = {"lr_scaling": 2.0}
    assert_equals_one_process(make, (DATA[0], errors), 8, **how)


def test_the_rate_that_counts_is_that_of_the_one_inside():
    """Also if only `apply_gradients` hands gradients on to it."""
    inner = ClipsPairs(0.1)
    assert leaves(Delegates(inner)) == [inner] and leaves(inner) == [inner]


def wrapped():
    """A model whose optimizer has state inside."""

    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    return make_compiled(make, Wrapping(inner), "mse", run_eagerly=True)


def test_the_state_of_an_optimizer_inside_is_broadcast(world):
    """In `model.fit`, where the inner one was made to average."""

    def fit(model, *data, **given):
        inner = keras_dist.DistributedOptimizer(model.optimizer.inside)
        inner.build(model.trainable_variables)
        inner.momentums[0].assign_add(np.full((3, 1), float(world.rank)))
        calls = [keras_dist.ReplicaCheck(), keras_dist.BroadcastVariables()]
        data = (array[world.rank :: world.size] for array in data)
        return model.fit(*data, callbacks=calls, **given)

    how = {"fit": fit, "epochs": 2, "tolerance": 1e-10, "logs": ()}
    assert_equals_one_process(wrapped, DATA, 4, **how)


def test_the_state_of_an_optimizer_inside_is_restored(folder):
    """Also if it is made in the first update."""
    given = {"shuffle": False, "verbose": 0, "batch": "global", "resume": folder}
    keras_dist.dist_fit(wrapped(), *DATA, batch_size=12, **given)
    how = {"epochs": 2, "tolerance": 1e-10, "options": {"resume": folder}}
    assert_equals_one_process(wrapped, DATA, 12, batch="global", **how)


@pytest.mark.parametrize("is_eager", shortened([True, False], {True}))
def test_an_optimizer_from_elsewhere_is_an_error_on_all_ranks(world, is_eager):
    """One that the model does not keep, such as a global variable."""

    def elsewhere(model, one, two):
        return lambda model: (one, two)

    plain = keras.optimizers.Optimizer.apply
    with pytest.raises(RuntimeError, match="does not average its gradients"):
        trained(keras_dist.dist_fit, elsewhere, 0.1, 4, is_eager)
    assert keras.optimizers.Optimizer.apply is plain


def test_optimizers_are_found_in_the_same_order_each_once():
    """Those nearest to the model first; cycles and long data do no harm."""
    one, two, three = (keras.optimizers.SGD(0.1, name=name) for name in "abc")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.early = {"b": [two], "a": (one,)}
    model.again = [one, two, model]
    model.data = list(range(10**5))
    model.numbers = np.zeros(3)
    model.late = three
    assert [found.name for found in optimizers_of(model)] == ["c", "a", "b"]
