"""Fits of one small model that differ in optimizer, layers, rows or callbacks.

Each is what a script of its own would do on each rank: the name of a function is the
name of its recording.
"""

import numpy as np
from results import record, rows, start
from tensorflow.keras import Sequential, callbacks, layers, losses, optimizers

from keras_dist import horovod as hvd
from keras_dist.horovod.callbacks import LearningRateScheduleCallback

hvd.init()

# The rows of this rank, and what each fit is given if nothing else is said.
MINE = slice(hvd.rank(), None, hvd.size())
GIVEN = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def ready(optimizer, *before, how=None, loss="mse", width=4, metrics=None):
    """Return a compiled model of layers and a last `Dense`, with known weights.

    `how` has arguments of `DistributedOptimizer`.
    """
    model = Sequential([*before, layers.Dense(1)])
    model.build((None, width))
    start(model)
    optimizer = hvd.DistributedOptimizer(optimizer, **(how or {}))
    model.compile(optimizer, loss, metrics=metrics)
    return model


def fit(optimizer, *before, data=None, mine=MINE, how=None, metrics=None, **given):
    """Train layers and a last `Dense` on rows of this rank; return model and logs."""
    x, y = data or rows()
    model = ready(optimizer, *before, how=how, width=x.shape[1], metrics=metrics)
    return model, model.fit(x[mine], y[mine], **(GIVEN | given)).history


def broadcast():
    """Each fit needs a callback of its own: it sends the first rank's weights once."""
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def clipnorm():
    """Clipping sees the average of all ranks."""
    x, y = rows()
    return fit(optimizers.SGD(0.1 * hvd.size(), clipnorm=0.1), data=(x, 10 * y))


def embedding(optimizer, **how):
    """Gradients of an `Embedding` are rows of a table, some repeated."""
    words = np.random.RandomState(3).randint(0, 7, (24, 3))
    y = words.sum(axis=1, keepdims=True).astype("float32") / 10
    given = {"data": (words, y), "batch_size": 4, "callbacks": [broadcast()]}
    return fit(optimizer, layers.Embedding(7, 2), layers.Flatten(), how=how, **given)


def half_precision():
    """Compression to 16 bits."""
    hidden, how = layers.Dense(3, "tanh"), {"compression": hvd.Compression.fp16}
    return fit(optimizers.SGD(0.1), hidden, how=how, callbacks=[broadcast()])


def tuned():
    """`gradient_predivide_factor` and `num_groups`, which change rounding only."""
    how = {"gradient_predivide_factor": 2.0, "num_groups": 2}
    return fit(optimizers.Adam(0.01 * hvd.size()), layers.Dense(3), how=how)


# By name: a function that trains; of these the weights alone are recorded.
WEIGHTS = {
    # Moving statistics of a BatchNormalization are each rank's own.
    "batch_norm": lambda: fit(
        optimizers.SGD(0.1), layers.Dense(3), layers.BatchNormalization()
    ),
    # Moments of the batches of all ranks.
    "sync_batch_norm": lambda: fit(
        optimizers.SGD(0.1), layers.Dense(3), hvd.SyncBatchNormalization()
    ),
    "clipnorm": clipnorm,
    "embedding": lambda: embedding(optimizers.SGD(0.1)),
    # The table is sent whole, and Adam moves all its rows.
    "embedding_dense": lambda: embedding(optimizers.Adam(0.01), sparse_as_dense=True),
    "half_precision": half_precision,
    # Gradients of the ranks are added, not averaged.
    "op_sum": lambda: fit(optimizers.SGD(0.05, momentum=0.9), how={"op": hvd.Sum}),
    "tuned": tuned,
}

# By name: a function that trains, and returns what to record.
FITS = {}


def fit_script(train):
    """Add a function to `FITS`."""
    FITS[train.__name__] = train
    return train


def accumulate(optimizer, **how):
    """Gradients of three batches are one, by default their sum, in each allreduce."""
    how["backward_passes_per_step"] = 3
    model, _ = fit(optimizer, how=how, data=rows(48), batch_size=4)
    iterations = int(model.optimizer.iterations)
    return {"weights": model.get_weights(), "iterations": iterations}


@fit_script
def accumulate_mean():
    """Or their average."""
    adam = optimizers.Adam(0.01 * hvd.size())
    return accumulate(adam, average_aggregated_gradients=True)


@fit_script
def accumulate_sum():
    """Of plain SGD."""
    return accumulate(optimizers.SGD(0.01 * hvd.size()))


@fit_script
def schedule_function():
    """A rate that is a function of the epoch, set at each batch."""
    rate = 0.01 * hvd.size()
    schedule = LearningRateScheduleCallback(
        initial_lr=rate,
        multiplier=lambda epoch: 0.5**epoch,
        staircase=False,
        momentum_correction=False,
        steps_per_epoch=4,
    )
    given = {"batch_size": 4, "epochs": 3, "callbacks": [broadcast(), schedule]}
    model, logs = fit(optimizers.Adam(learning_rate=rate), **given)
    return {"weights": model.get_weights(), "rates": logs["lr"]}


@fit_script
def schedule_steps():
    """ResNet's schedule: warm-up, then the rate is divided at certain epochs."""
    rate = 0.05 * hvd.size()
    callbacks = [
        broadcast(),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
        LearningRateScheduleCallback(rate, multiplier=1.0, start_epoch=2, end_epoch=3),
        LearningRateScheduleCallback(rate, multiplier=1e-1, start_epoch=3, end_epoch=5),
        LearningRateScheduleCallback(rate, multiplier=1e-2, start_epoch=5),
    ]
    sgd = optimizers.SGD(learning_rate=rate, momentum=0.5)
    given = {"epochs": 7, "callbacks": callbacks, "metrics": ["mae"]}
    model, logs = fit(sgd, **given)
    return {"weights": model.get_weights(), "logs": logs}


@fit_script
def warmup_momentum():
    """Warm-up of a rate with momentum, which is corrected when the rate changes."""
    rate = 0.02 * hvd.size()
    warmup = hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=rate, warmup_epochs=3, verbose=1
    )
    sgd = optimizers.SGD(learning_rate=rate, momentum=0.9)
    callbacks = [broadcast(), hvd.callbacks.MetricAverageCallback(), warmup]
    given = {"batch_size": 4, "epochs": 4, "callbacks": callbacks}
    model, logs = fit(sgd, **given)
    return {"weights": model.get_weights(), "logs": logs}


@fit_script
def allreduce_callback():
    """A callback of one's own averages what each rank has measured."""
    x, y = rows()
    means = []

    class Average(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            error = np.abs(self.model.predict(x[MINE], verbose=0) - y[MINE]).mean()
            both = hvd.allreduce(np.array([error, logs["loss"]]), name="errors")
            means.append(both.numpy())
            logs["mean_error"] = float(both[0])

    given = [Average(), hvd.callbacks.MetricAverageCallback()]
    model, logs = fit(optimizers.SGD(0.1), epochs=3, callbacks=given)
    return {"weights": model.get_weights(), "means": means, "logs": logs}


@fit_script
def load_model():
    """The optimizer of a whole model from a file averages, and goes on."""
    x, y = rows()

    def train(model):
        model.fit(x[MINE], y[MINE], callbacks=[broadcast()], **GIVEN)

    adam = optimizers.Adam(learning_rate=0.01 * hvd.size())
    model = ready(adam, loss=losses.MeanSquaredError(reduction="sum"))
    train(model)
    if hvd.rank() == 0:
        model.save("model.keras")
    hvd.broadcast(0, 0, name="saved")
    loaded = hvd.load_model("model.keras", compression=hvd.Compression.none)
    rate = float(loaded.optimizer.learning_rate)
    train(loaded)
    return {"weights": loaded.get_weights(), "rate": rate}


@fit_script
def plateau():
    """Averaged metrics are what ReduceLROnPlateau and EarlyStopping decide by."""
    x, y = rows(40)
    y = y + 0.5 * hvd.rank()  # the ranks would decide differently by themselves
    by = {"monitor": "val_loss", "min_delta": 0.02}
    given = [
        broadcast(),
        hvd.callbacks.MetricAverageCallback(),
        callbacks.ReduceLROnPlateau(factor=0.2, patience=1, **by),
        callbacks.EarlyStopping(patience=3, **by),
    ]
    if hvd.rank() == 0:
        given.append(callbacks.CSVLogger("log.csv"))
    model, logs = fit(
        optimizers.SGD(learning_rate=0.3 * hvd.size()),
        data=(x, y),
        mine=slice(32),
        metrics=["mae"],
        epochs=10,
        validation_data=(x[32:], y[32:]),
        callbacks=given,
    )
    return {
        "weights": model.get_weights(),
        "logs": {name: logs[name] for name in ("loss", "mae", "val_loss", "val_mae")},
        "rate": float(model.optimizer.learning_rate),
    }


@fit_script
def ragged():
    """Ranks with different numbers of rows, which count the same."""
    x, y = rows(36)
    mine, size = (slice(24), 8) if hvd.rank() == 0 else (slice(24, 36), 4)
    model, logs = fit(
        optimizers.SGD(0.1),
        data=(x, y),
        mine=mine,
        batch_size=size,
        metrics=["mae"],
        validation_data=(x[mine][:10], y[mine][:10]),
        callbacks=[broadcast(), hvd.callbacks.MetricAverageCallback()],
    )
    return {"weights": model.get_weights(), "logs": logs}


@fit_script
def train_on_batch():
    """A loop over `train_on_batch`."""
    x, y = rows()
    model = ready(optimizers.Adagrad(0.1 * hvd.size()))
    for batch in range(4):
        first = batch * 8 + hvd.rank() * 4
        model.train_on_batch(x[first : first + 4], y[first : first + 4])
    return {"weights": model.get_weights()}


record(**{name: train() for name, train in FITS.items()})
for name, train in WEIGHTS.items():
    record(**{name: {"weights": train()[0].get_weights()}})
