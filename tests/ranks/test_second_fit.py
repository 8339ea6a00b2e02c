"""A second `dist_fit` uses the step that was traced before, as Keras does."""

import gc
import weakref
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    largest_difference,
    shortened,
    train_on_one_process,
)
from harness.models import make_compiled, update

import keras_dist

GIVEN = {"batch_size": 6, "shuffle": False, "verbose": 0}

# As a script for one process calls them.
plain_fit = partial(keras.Model.fit, **GIVEN)
dist_fit = partial(keras_dist.dist_fit, batch="global", **GIVEN)


class NotedSGD(keras.optimizers.SGD):
    """Notes each variable that an update is traced for."""

    def update_step(self, gradient, variable, learning_rate):
        self.noted = [*getattr(self, "noted", []), variable.name]
        super().update_step(gradient, variable, learning_rate)


def two_layers():
    return keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


def make():
    """A model with four weights, in a graph."""
    how = {"metrics": ["mae"], "run_eagerly": False}
    return make_compiled(two_layers, NotedSGD(0.1, momentum=0.9), "mse", **how)


def assert_equals(run, make=make):
    """Do the same with plain Keras on one process and with `dist_fit`."""

    def plainly():
        expected = make()
        return expected, {"found": run(expected, plain_fit)}

    oracle, model = train_on_one_process(plainly), make()
    found = run(model, dist_fit)
    np.testing.assert_allclose(found, oracle.history["found"], rtol=1e-5)
    assert largest_difference(model, oracle) < 1e-5
    assert_equal_to_the_bit(model)
    return model


@pytest.mark.several_ranks
def test_a_fit_for_each_epoch_is_traced_once(rows):
    """With other rows, batches, positions and a validation in between."""
    x, y = rows

    def run(model, fit):
        losses = []
        for epoch, count in enumerate([96, 96, 101, 60]):
            given = {"initial_epoch": epoch, "epochs": epoch + 1}
            if epoch == 3:
                given = {"epochs": 2, "steps_per_epoch": 5}
            history = fit(model, x[:count], y[:count], validation_data=rows, **given)
            losses += history.history["loss"] + history.history["val_mae"]
        return losses

    # Once more for the shape of the last batch of 101 rows; Keras's own cache has both.
    assert len(assert_equals(run).optimizer.noted) <= 2 * 4


@pytest.mark.parametrize("is_trained_first", shortened([False, True], {False}))
def test_trainable_is_that_of_the_traced_step(rows, is_trained_first):
    """Without `compile`, a switch between two fits changes nothing, as in Keras."""
    x, y = (array[:96] for array in rows)

    def run(model, fit):
        model.layers[0].trainable = is_trained_first
        first = fit(model, x, y).history["loss"]
        model.layers[0].trainable = not is_trained_first
        return first + fit(model, x, y).history["loss"]

    assert_equals(run)


def test_what_a_graph_holds_is_traced_again_where_it_differs(rows):
    """Another rate, an optimizer of another kind, or `compile`."""
    x, y = (array[:96] for array in rows)
    model = make()
    for scaling, count in ((1.0, 4), (1.0, 4), (2.0, 8), (2.0, 8), (1.0, 12)):
        keras_dist.dist_fit(model, x, y, lr_scaling=scaling, **GIVEN)
        assert len(model.optimizer.noted) == count
    model.compile(NotedSGD(0.1), "mse", run_eagerly=False)
    keras_dist.dist_fit(model, x, y, lr_scaling=1.0, **GIVEN)
    assert len(model.optimizer.noted) == 4
    assert_equal_to_the_bit(model)


@pytest.mark.several_ranks
def test_all_ranks_trace_if_one_has_to(rows, world):
    """Where one has compiled, and after an error; not where one has set its weights.

    Weights are copied before the first step, also of a function that was traced before.
    """
    x, y = (array[:96] for array in rows)

    def fail(batch, logs):
        raise KeyError("tea")

    fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    model = make()
    dist_fit(model, x, y)
    if world.rank == 1:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    dist_fit(model, x, y)
    assert len(model.optimizer.noted) == 4
    assert_equal_to_the_bit(model)
    if world.rank == 1:
        optimizer = model.optimizer
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=False)
    dist_fit(model, x, y)
    assert len(model.optimizer.noted) == 8
    with pytest.raises((KeyError, RuntimeError), match="tea"):
        dist_fit(model, x, y, callbacks=[fails])
    dist_fit(model, x, y)
    assert len(model.optimizer.noted) == 12
    assert_equal_to_the_bit(model)


class CallsFunction(keras.Sequential):
    """A step of which a function of TensorFlow, with a branch, is a part."""

    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)[:, 0]))
            if loss > 1e9:
                loss *= 2.0
        update(tape, loss, self.optimizer, self)
        return loss

    def train_step(self, data):
        return {"loss": self.update(*data)}


def call_function():
    """A model with such a step."""
    keras.utils.set_random_seed(3)
    return CallsFunction([keras.Input((5,)), keras.layers.Dense(1)])


@pytest.mark.several_ranks
@pytest.mark.parametrize("options", shortened([{}, {"jit_compile": True}], [{}]))
def test_a_function_in_a_step_keeps_no_trace(rows, options):
    """After `compile`, the next fit would use tensors of the last one."""
    x, y = (array[:96] for array in rows)

    def run(model, fit):
        optimizer = keras.optimizers.SGD(0.1)
        for _ in range(2):
            model.compile(optimizer, **(options if fit is dist_fit else {}))
            losses = fit(model, x, y).history["loss"]
        return losses

    assert_equals(run, call_function)


@pytest.mark.several_ranks
def test_a_complete_model_is_not_traced_to_be_built(rows):
    """Its step is traced as the one that trains alone."""
    x, y = (array[:96] for array in rows)
    model = call_function()
    model.compile(NotedSGD(0.1), run_eagerly=False)
    counts = []
    for scaling in (1.0, 2.0):
        keras_dist.dist_fit(model, x, y, lr_scaling=scaling, **GIVEN)
        counts.append(len(model.optimizer.noted))
    assert counts == [2 + 2, 2 + 2 + 2]


def test_no_data_outlives_a_fit(rows):
    """Neither training nor validation data, also where an evaluation comes between."""
    model, dead = make(), []
    for _ in range(2):
        x, y = (array.copy() for array in rows)
        held_out = x.copy(), y.copy()
        dist_fit(model, x, y, validation_data=held_out)
        keras_dist.DistributedModel(model).evaluate(*held_out, verbose=0)
        dead += [weakref.ref(array) for array in (x, y, *held_out)]
        del x, y, held_out
        gc.collect()
        assert [ref() is None for ref in dead] == [True] * len(dead)
    assert not hasattr(model, "_distributed_session")
