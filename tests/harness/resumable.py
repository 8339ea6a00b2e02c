"""A small training with every kind of state, for tests that end and resume it."""

import glob
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_dist
from harness.data_kinds import Sequence, WithoutLength, kept, slices, unchanged
from harness.models import vectors
from keras_dist import private
from keras_dist.optimizer import step_context

NUM_ROWS = 101


class Recording(keras.Sequential):
    """Calls `saw` with the rows of each step: the last number of a row is its own.

    A batch that is a copy has none: it does not count.
    """

    def train_step(self, data):
        rows = np.asarray(data[0])[:, -1].astype(int).tolist()
        has_rows = step_context.current().has_rows
        if has_rows is not None and not has_rows:
            rows = []
        self.saw(int(private.batches_of(self.optimizer)), rows)
        return super().train_step(data)


class Dies(keras.callbacks.Callback):
    """Calls `die` on all ranks after so many steps, or soon after them.

    A rank that received SIGTERM makes one more step, so it may call it later.
    """

    def __init__(self, updates, die):
        super().__init__()
        self.updates = updates
        self.die = die

    def on_train_batch_end(self, batch, logs=None):
        # No attribute is set here: it would be saved, and restored in the next launch.
        done = int(private.batches_of(self.model.optimizer))
        if self.updates and done >= self.updates:
            self.die()


class Counts(keras.layers.Layer):
    """Counts the rows that all ranks have trained on."""

    def build(self, shape):
        self.rows = self.add_weight(
            initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(float(x.shape[0]))
        return x


class OwnStatistics(keras_dist.AverageStatistics):
    """One of the user's own, which is found by what it is, not by its name."""


def rows_of_all():
    """Inputs that end with the number of the row, and targets."""
    x, y = vectors(NUM_ROWS)
    return np.column_stack([x, np.arange(NUM_ROWS)]).astype("float32"), y


def make_model(seed, *, is_equivalent=False, is_small=False):
    """With dropout, statistics, a schedule, Adam, and metrics.

    Args:
        seed: Of the weights that a training from the beginning starts from.
        is_equivalent: Without layers that depend on how rows are sharded; with a
            counter of rows, and updates after every second step.
        is_small: Without all of that: a step of it takes a quarter of the time.
    """
    keras.utils.set_random_seed(seed)
    first = keras.layers.Rescaling([1.0] * 5 + [0.0])
    last = keras.layers.Dense(1, activation="sigmoid")
    if is_small:
        model = Recording([first, last])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "binary_crossentropy", run_eagerly=True)
        return model
    middle = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    if is_equivalent:
        middle = [Counts(), keras.layers.Dropout(0.5)]
    model = Recording([first, keras.layers.Dense(8, "tanh"), *middle, last])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)
    every = 2 if is_equivalent else None
    optimizer = keras.optimizers.Adam(schedule, gradient_accumulation_steps=every)
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    how = {"metrics": metrics, "run_eagerly": True}
    model.compile(optimizer, "binary_crossentropy", **how)
    return model


def shuffled_rows(x, y, prepare=lambda rows: rows):
    """Rows that are prepared, and then shuffled anew for each pass."""
    tf.random.set_seed(5)  # a part of the seeds of a shuffle
    return prepare(slices((x, y))).shuffle(50, seed=4)


def files(x, y):
    """Rows of records in three files, in turn; a `map` draws random numbers."""
    tf.random.set_seed(5)
    folder = tempfile.mkdtemp()
    names = [f"{folder}/{part}" for part in range(3)]
    for part, name in enumerate(names):
        with tf.io.TFRecordWriter(name) as file:
            for row in range(part, len(x), 3):
                file.write(tf.io.serialize_tensor([*x[row], y[row]]).numpy())

    def decoded(record):
        row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [x.shape[1] + 1])
        return row[:-1] + 0 * tf.random.uniform([]), row[-1]

    records = slices(names).interleave(
        tf.data.TFRecordDataset, cycle_length=3, num_parallel_calls=2
    )
    return records.map(decoded, num_parallel_calls=2).shuffle(9, seed=2).batch(6)


def unseeded(x, y):
    """Rows that are shuffled without a seed, in batches of known number."""
    tf.random.set_seed(None)
    return slices((x, y)).shuffle(50).batch(6).prefetch(2)


def rank_rows(x, y):
    """A part of the rows for each rank, as "steady"."""
    own = slice(keras_dist.rank(), 6 * 15, keras_dist.size())
    return WithoutLength(x[own], y[own], 6)


# Makes data in batches of six of rows of `x` and `y`.
KINDS = {
    "sequence": lambda x, y: Sequence(x, y, [6]),
    # The last rows are left out, here and in the next one.
    "data set": lambda x, y: slices((x, y)).batch(6, drop_remainder=True),
    "shuffled": lambda x, y: shuffled_rows(x, y, tf.data.Dataset.cache).batch(
        6, drop_remainder=True
    ),
    # With the last rows, of which it shows late what the ranks make.
    "shuffled unevenly": lambda x, y: shuffled_rows(x, y).batch(6),
    # Each rank divides rows that are shuffled anew for each pass.
    "divided": lambda x, y: (
        shuffled_rows(x, y).apply(keras_dist.shard(6)).map(unchanged).batch(6)
    ),
    # Of unknown number.
    "filtered": lambda x, y: (
        shuffled_rows(x, y, lambda rows: rows.filter(kept)).batch(6).prefetch(2)
    ),
    "files": files,
    "unseeded": unseeded,
    # All passes have the order of the first one, whose last batch completes the cache.
    "cached": lambda x, y: shuffled_rows(x, y).cache().batch(6),
    # The same in each pass; nothing says where it is.
    "steady": lambda x, y: WithoutLength(x, y, 6),
    "rows of a rank": rank_rows,
}


def train(
    folder,
    *,
    saw,
    seed=3,
    dies=None,
    die=None,
    is_equivalent=False,
    is_small=False,
    as_data=None,
    **options,
):
    """Train in `folder` for three epochs; the state, and the `History`.

    Args:
        folder: As `resume`.
        saw: Called with the number of each update, and the rows of this rank.
        seed: Of the weights of a process that resumes, which must replace them.
        dies: Updates after which `die` is called.
        die: Ends the training on this rank.
        is_equivalent: As in `make_model`.
        is_small: As there; and the training is not validated.
        as_data: Key of `KINDS`; `None` for arrays.
        **options: Of `dist_fit`.
    """
    is_resumed = folder is not None and glob.glob(f"{folder}/checkpoint-*")
    model = make_model(
        seed if is_resumed else 3, is_equivalent=is_equivalent, is_small=is_small
    )
    x, y = rows_of_all()
    object.__setattr__(model, "saw", saw)
    callbacks = [Dies(dies, die), *[OwnStatistics()] * is_equivalent]
    given = {"batch_size": 6, "epochs": 3, "lr_scaling": "sqrt", "verbose": 0}
    if not is_small:
        # No epoch improves by `min_delta`: training stops after the third one.
        given |= {"epochs": 5, "validation_data": (x[:31], y[:31])}
        callbacks.append(
            keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=10)
        )
    given |= {"resume": folder} | options
    if as_data is not None:
        x, y = KINDS[as_data](x, y), None
        del given["batch_size"]
    history = keras_dist.dist_fit(model, x, y, callbacks=callbacks, **given)
    return state_of(model, is_equivalent), history


def state_of(model, is_equivalent):
    """All numbers of a model; or those that are equal on any number of ranks."""
    numbers = [*(model.weights if is_equivalent else model.variables)]
    numbers += model.optimizer.variables
    return [np.array(keras.ops.convert_to_numpy(number)) for number in numbers]


def values_of(history):
    """The values of a `History`, without the throughput."""
    return {n: v for n, v in history.history.items() if n != "rows_per_second"}
