"""The state of a resumed training: rates, batches, callbacks."""

import time

import keras
import numpy as np

import keras_dist
from keras_dist.checkpoint import files
from keras_dist.checkpoint.states import CallbackStates
from keras_dist.optimizer import rate


def leaf_at(updates, *rates):
    """An optimizer with a schedule after so many updates, its rate scaled."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.5)
    leaf = keras.optimizers.SGD(schedule)
    leaf.build([])
    leaf.iterations.assign(updates)
    if rates:
        rate.scale_rate(leaf, *rates)
    return leaf


def test_schedules_and_warmup_resume_on_other_numbers_of_ranks():
    """At the steps of one process: on two ranks, then on three, then on one."""
    two = leaf_at(100, 2.0, 600, 2)
    three = leaf_at(100, 3.0, 400, 3)
    rate.restore_rate_progress(three, rate.rate_progress(two), 400 / 600)
    plain = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.5)
    np.testing.assert_allclose(three.learning_rate, plain(200), rtol=1e-6)
    three.iterations.assign(150)  # a quarter of the rest of the warm-up
    np.testing.assert_allclose(three.learning_rate, plain(350), rtol=1e-6)
    before = rate.effective_rate(three) / float(plain(347))
    np.testing.assert_allclose(before, 1 + 2 * (400 / 6 + 49) / 400, rtol=1e-5)
    again = leaf_at(150, 3.0, 400, 3)
    rate.restore_rate_progress(again, rate.rate_progress(three), 1)
    assert rate.effective_rate(again) == rate.effective_rate(three)
    # A callback compiles the model once more, with the same optimizer.
    rate.scale_rate(again, 3.0, 400, 3)
    assert rate.effective_rate(again) == rate.effective_rate(three)
    one = leaf_at(150)
    rate.restore_rate_progress(one, rate.rate_progress(three), 0)
    np.testing.assert_allclose(one.learning_rate, plain(350), rtol=1e-6)
    same = leaf_at(150)
    rate.restore_rate_progress(same, rate.rate_progress(leaf_at(150)), 1)
    assert type(same) is keras.optimizers.SGD


def write_and_read(path, value):
    """What a checkpoint with a value has."""
    folder = files.Folder(str(path))
    folder.write(value)
    return folder.newest()[0]


class HasStateDict(keras.callbacks.Callback):
    """Returns and loads its own state."""

    def __init__(self):
        super().__init__()
        self.secret = {1, 2}

    def state_dict(self):
        """As a list."""
        return {"secret": sorted(self.secret)}

    def load_state_dict(self, state):
        """As a set again."""
        self.secret = set(state["secret"])


def test_callbacks_restore_attributes_that_have_changed(tmp_path):
    """But no arguments of the script, as a new patience; `state_dict` comes first."""

    def make(patience):
        stops = keras.callbacks.EarlyStopping(patience=patience)
        return [stops, HasStateDict(), keras.callbacks.EarlyStopping(patience=9)]

    callbacks = make(3)
    states = CallbackStates(callbacks)
    for callback in callbacks:
        callback.on_train_begin()
    states.begin()
    callbacks[0].best_weights = [np.arange(3.0)]
    callbacks[0].wait, callbacks[0].best = 2, np.float32(0.25)
    callbacks[1].secret = {7}
    saved = write_and_read(tmp_path, states.collect())
    again = make(5)
    CallbackStates(again).restore(saved)
    assert (again[0].wait, again[0].best, again[0].patience) == (2, 0.25, 5)
    assert again[0].best_weights[0].tolist() == [0, 1, 2]
    assert again[1].secret == {7} and again[2].wait == 0


def test_statistics_of_a_checkpoint_without_their_number_of_ranks_are_loaded():
    """Checkpoints of 1.0.0's first days do not have it."""
    statistics = keras_dist.AverageStatistics()
    statistics.load_state_dict({"has_changed": True, "before": [7]})
    assert statistics._loaded == [7]


class Clocks(keras.callbacks.Callback):
    """Reads clocks, and counts."""

    def __init__(self):
        super().__init__()
        self.saved_at, self.started, self.counted_at = None, 0.0, 0
        self.times, self.loss, self.pairs = [], 1.0, []

    def on_epoch_end(self, epoch, logs=None):
        """As one that saves every ten minutes does."""
        now = time.monotonic()
        self.saved_at, self.started = now, time.perf_counter()
        self.counted_at = time.monotonic_ns()
        self.times.append(now)
        self.loss = float(np.float32(now))
        self.pairs.append((now, 0.5))


def test_no_callback_gets_the_clock_of_another_process(tmp_path):
    """What it counts there is nothing here; a loss of that size is kept."""
    first, second = Clocks(), Clocks()
    states = CallbackStates([first])
    states.begin()
    first.on_epoch_end(0)
    CallbackStates([second]).restore(write_and_read(tmp_path, states.collect()))
    assert (second.saved_at, second.started, second.counted_at) == (None, 0.0, 0)
    assert second.times == [] and second.loss == first.loss
    assert second.pairs == first.pairs
