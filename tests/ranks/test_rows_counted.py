"""Metrics count every row once: random data of all kinds, on all ranks.

ROWS_FIRST=0 ROWS_COUNT=200 tries others, and more.
"""

import contextlib
import functools
import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import Ended
from harness.data_kinds import ARRAYS, KINDS
from harness.models import make_compiled

import keras_dist
from keras_dist.data.pipeline import as_untuned

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.filterwarnings("error:Your input ran out of data"),
]

FIRST = int(os.environ.get("ROWS_FIRST", "0"))
COUNT = int(os.environ.get("ROWS_COUNT", "6"))

# More than the number of any row.
ROWS = 70

# A training takes five times as long as an evaluation: one of so many cases trains.
TRAINS = 5


@dataclass(frozen=True)
class Case:
    """Data of a kind, of so many rows, in batches of one size on each rank."""

    kind: str
    rows: int
    batch_size: int
    shuffle: bool

    def data(self) -> Any:
        """The data, made anew as each rank makes it."""
        ids = np.arange(self.rows)
        return KINDS[self.kind](ids.astype("float32"), ids, self.batch_size)

    @functools.cache  # noqa: B019 - of a few cases
    def counted(self) -> Counter[int]:
        """How often one process reads each row, in a plain pass."""
        data = self.data()
        if self.kind in ARRAYS:
            return Counter(range(self.rows))
        if isinstance(data, keras.utils.PyDataset):
            data = [data[index] for index in range(data.num_batches)]
        if isinstance(data, tf.data.Dataset):
            data = as_untuned(data)
        return Counter(row for _, y in data for row in np.asarray(y).astype(int))


def draw(seed: int) -> Case:
    """A function of its seed alone; small numbers come more often."""
    draws = random.Random(seed)
    return Case(
        kind=draws.choice(sorted(KINDS)),
        rows=draws.randint(1, draws.choice([5, 20, 70])),
        batch_size=draws.randint(1, draws.choice([4, 12, 33])),
        shuffle=draws.random() < 0.5,
    )


class TimesCounted(keras.metrics.Metric):
    """How often each row was counted; its number is the target."""

    def __init__(self, name="counted"):
        super().__init__(name=name)
        self.counts = self.add_weight(shape=(ROWS,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.counts.assign_add(tf.math.bincount(ids, None, ROWS, ROWS, tf.float32))

    def result(self):
        return tf.identity(self.counts)


class Scaled(keras.Model):
    """A weight times the mean of each row."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        rows = tf.reshape(tf.cast(x, tf.float32), [tf.shape(x)[0], -1])
        return self.factor * tf.reduce_mean(rows, axis=1)


@pytest.fixture(scope="module")
def model():
    """One model for all cases: compiled once."""
    how = {"metrics": [TimesCounted()], "run_eagerly": True}
    return make_compiled(Scaled, keras.optimizers.SGD(1e-6), "mse", **how)


def times(counts) -> Counter[int]:
    """The result of `TimesCounted` as a counter."""
    return +Counter({row: int(count) for row, count in enumerate(counts)})


def evaluated(model, case) -> Counter[int]:
    """Rows that an evaluation on all ranks has counted."""
    x, y = case.data() if case.kind in ARRAYS else (case.data(), None)
    logs = keras_dist.DistributedModel(model).evaluate(
        x, y, batch_size=case.batch_size, verbose=0, return_dict=True
    )
    return times(logs["counted"])


class EndsAfter(keras.callbacks.Callback):
    """Ends a fit on all ranks after so many batches; no attribute of it is saved."""

    def __init__(self, batches):
        super().__init__()
        self.batches = iter(range(batches))

    def on_train_batch_end(self, batch, logs=None):
        if next(self.batches, None) is None:
            raise Ended


def trained(model, case, validation, epochs, **options):
    """For each epoch, rows that training and validation have counted."""
    x, y = case.data() if case.kind in ARRAYS else (case.data(), None)
    options |= {"epochs": epochs, "shuffle": case.shuffle, "verbose": 0}
    options["batch_size"] = case.batch_size if case.kind in ARRAYS else None
    options["validation_data"] = validation.data()
    options["validation_batch_size"] = validation.batch_size
    history = keras_dist.dist_fit(model, x, y, **options).history
    names = ("counted", "val_counted")
    return zip(*([times(c) for c in history[name]] for name in names), strict=True)


def drawn(seed, size):
    """Training and validation data that have rows for all ranks, or for one."""
    training, validation = draw(2 * seed), draw(2 * seed + 1)
    is_enough = training.rows >= size or training.kind not in ARRAYS
    if not (is_enough and training.counted() and validation.counted()):
        return None
    return training, validation


def check_resumed(model, training, validation, folder, batches):
    """The same of a training that was ended after some batches."""
    with contextlib.suppress(Ended):
        ends = [EndsAfter(batches)]
        options = {"resume": folder, "save_steps": 1, "callbacks": ends}
        trained(model, training, validation, 2, **options)
    check_training(model, training, validation, resume=folder)


def check_training(model, training, validation, **options):
    """All rows, in each epoch."""
    expected = training.counted(), validation.counted()
    once = "generator" in (training.kind, validation.kind)
    for found in trained(model, training, validation, 1 if once else 2, **options):
        assert found == expected


@pytest.mark.parametrize("begin", range(FIRST, FIRST + COUNT, 20))
def test_metrics_count_every_row_once(model, world, begin, folder):
    """In evaluations and in trainings, also resumed ones, of all kinds of data."""
    for seed in range(begin, min(begin + 20, FIRST + COUNT)):
        cases = drawn(seed, world.size)
        if cases is None:
            continue
        try:
            assert evaluated(model, cases[1]) == cases[1].counted()
            if seed % TRAINS == 0:
                check_training(model, *cases)
            kinds = [case.kind for case in cases]
            if seed % TRAINS == 1 and "generator" not in kinds:
                check_resumed(model, *cases, f"{folder}/{seed}", seed % 7)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {cases}") from error
