"""`ReplicaCheck` finds what differs between ranks, and nothing else."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    KERAS,
    assert_equal_to_the_bit,
    raises_everywhere,
    slow_on_three,
    warned,
)
from harness.models import dropping, make_compiled

import keras_dist
from keras_dist.comm import runtime
from keras_dist.comm.devices import Device

pytestmark = pytest.mark.several_ranks


class Changes(keras.callbacks.Callback):
    """Changes a number on the last rank, after the second step of the second epoch."""

    def __init__(self, choose, value=None):
        super().__init__()
        self.choose, self.value, self.epoch = choose, value, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        is_last = keras_dist.rank() == keras_dist.size() - 1
        if is_last and (self.epoch, batch) == (1, 1):
            variable = self.choose(self.model)
            changed = np.array(keras.ops.convert_to_numpy(variable))
            if self.value is None:  # the next update may round a last bit away
                changed.flat[-1] = changed.flat[-1] * 1.001 + 1e-6
            else:
                changed.flat[-1] = self.value
            variable.assign(changed)


def kernel(model):
    """The second to last weight."""
    return model.trainable_weights[-2]


def slot(model):
    """Its momentum."""
    return model.optimizer.variables[-2]


def fit(model, rows, *callbacks, **arguments):
    """Three epochs of four steps."""
    x, y = (array[: 32 * keras_dist.size()] for array in rows)
    given = {"batch_size": 8, "epochs": 3, "verbose": 0} | arguments
    return keras_dist.dist_fit(model, x, y, callbacks=list(callbacks), **given)


@slow_on_three
def test_one_number_changed_on_one_rank_is_found_and_named(rows, make_model):
    """At the next check: of a weight by a thousandth, of a slot, and to NaN."""
    last = keras_dist.size() - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    if keras_dist.rank():
        make_model()  # Keras counts its layers, and names the next ones by that
    for choose, value in ((kernel, None), (slot, None), (slot, np.nan)):
        model = make_model()
        model.optimizer.build(model.trainable_variables)
        path = keras_dist.broadcast(choose(model).path)
        callbacks = Changes(choose, value), keras_dist.ReplicaCheck(every=1)
        call = partial(fit, model, rows, *callbacks)
        messages = raises_everywhere(RuntimeError, call)
        assert len(set(messages)) == 1
        # With the next update it changes other variables, too.
        assert "after step 3 of epoch 2" in messages[0]
        assert f" on rank {last} differs from {others}" in messages[0]
        assert f"`{path}`" in messages[0]
        assert int(model.optimizer.iterations) == 4 + 3


@slow_on_three
def test_another_number_of_threads_is_named_as_a_cause(monkeypatch, rows, make_model):
    """On which norms depend, and so the weights where gradients are clipped."""
    device = Device(threads=2 + keras_dist.rank())
    monkeypatch.setattr(runtime._runtime, "device", device)
    callbacks = Changes(kernel), keras_dist.ReplicaCheck(every=1)
    threads = list(range(2, 2 + keras_dist.size()))
    text = f"which is {threads} on the ranks: set one TF_NUM_INTRAOP_THREADS"
    call = partial(fit, make_model(), rows, *callbacks)
    raises_everywhere(RuntimeError, call, text)


@pytest.mark.three_ranks
def test_dist_fit_checks_at_the_end_of_each_epoch(rows, make_model):
    """Without an option, and before anything of that epoch is saved."""
    saved = []
    saves = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: saved.append(epoch)
    )
    call = partial(fit, make_model(), rows, Changes(kernel), saves)
    raises_everywhere(RuntimeError, call, "after step 4 of epoch 2")
    assert saved == [0]


@slow_on_three
def test_resync_makes_the_ranks_equal_again(rows, make_model):
    """With checks after every second step, two updates use the wrong gradients."""
    model, oracle = make_model(), make_model()
    fit(oracle, rows, shuffle=False)
    with warned("hold the same model") as found:
        check = keras_dist.ReplicaCheck(every=2, action="resync")
        fit(model, rows, Changes(kernel, 7.0), check, shuffle=False)
    assert len(found) == (keras_dist.rank() == 0)
    assert all("They are copied from rank 0 to all." in text for text in found)
    assert_equal_to_the_bit(model)
    if keras_dist.size() == 3:  # the gradients of one wrong rank are in two updates
        gap = np.abs(kernel(model).numpy() - kernel(oracle).numpy()).max()
        assert 0 < gap < 0.5


def test_what_ranks_may_hold_differently_is_not_reported(rows):
    """Statistics, metrics, generators, accumulators."""
    adam = keras.optimizers.Adam(gradient_accumulation_steps=3)
    how = {"metrics": ["mae"], "run_eagerly": True}
    model = make_compiled(dropping, adam, "mse", **how)
    fit(model, rows, keras_dist.ReplicaCheck(every=1), validation_data=rows)


def test_steps_of_one_execution_are_counted(rows, make_model):
    """A check that is due inside of an execution comes after it."""
    checks = []

    class Counts(keras_dist.ReplicaCheck):
        def check(self):
            checks.append(self._steps)
            super().check()

    model = make_model(run_eagerly=False, jit_compile=False, steps_per_execution=2)
    fit(model, rows, Counts(every=3))
    # Keras 3.10 calls callbacks with the first step of an execution, not its last.
    expected = [4, 4, 6, 8, 10, 12, 12]
    assert checks == (expected if KERAS >= (3, 11) else [3, 3, 6, 6, 9, 9])


def test_different_settings_on_the_ranks_are_an_error(rows, make_model):
    """Otherwise the ranks would wait for each other forever."""
    check = keras_dist.ReplicaCheck(every=1 + keras_dist.rank())
    text = "rank 0: every=1, action='raise'; rank 1: every=2"
    raises_everywhere(ValueError, lambda: fit(make_model(), rows, check), text)


def test_unusable_settings_are_errors(world):
    """The message has what was received."""
    for arguments in ({"every": 0}, {"every": True}, {"every": 1.5}, {"action": "x"}):
        [(name, value)] = arguments.items()
        with pytest.raises(ValueError, match=f"Received: {name}={value!r}"):
            keras_dist.ReplicaCheck(**arguments)


class Sam(keras.Sequential):
    """Goes up the gradient, takes a second one there, and goes down again."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            return loss, tape.gradient(loss, weights)

        _, up = gradients()
        norm = tf.linalg.global_norm(up)
        ascent = [0.0527 * grad / norm for grad in up]
        for weight, each in zip(weights, ascent, strict=True):
            weight.assign_add(each)
        loss, grads = gradients()
        for weight, each in zip(weights, ascent, strict=True):
            weight.assign_sub(each)
        self.optimizer.apply(grads, weights)
        return {"loss": loss}


def test_a_step_that_leaves_roundings_is_named(world, rows):
    """Sharpness-aware minimization, with the weights put back by a subtraction."""
    keras.utils.set_random_seed(3)
    model = Sam([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(RuntimeError, match=r"`Sam.train_step`.*leaves rounding errors"):
        keras_dist.dist_fit(model, *rows, epochs=4, batch_size=4, verbose=0)
