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

# By name: a function that trains, and returns what to record.
FITS = {}


def fit_script(train):
    """Add a function to `FITS`."""
    FITS[train.__name__] = train
    return train


def ready(optimizer, *before, loss="mse", width=4, **how):
    """Return a compiled model of layers and a last `Dense`, with known weights."""
    model = Sequential([*before, layers.Dense(1)])
    model.build((None, width))
    start(model)
    model.compile(optimizer, loss, **how)
    return model


def fit(optimizer, *before, data=None, mine=None, metrics=None, **how):
    """Train layers and a last `Dense` on rows of this rank; return model and logs."""
    x, y = data or rows()
    mine = slice(hvd.rank(), None, hvd.size()) if mine is None else mine
    model = ready(optimizer, *before, width=x.shape[1], metrics=metrics)
    given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, model.fit(x[mine], y[mine], **(given | how)).history


def broadcast():
    """Each fit needs a callback of its own: it sends the first rank's weights once."""
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def weights_of(*args, **kwargs):
    """Fit, and return the weights alone."""
    return {"weights": fit(*args, **kwargs)[0].get_weights()}


@fit_script
def accumulate_mean():
    """Gradients of three batches are averaged before each allreduce."""
    optimizer = hvd.DistributedOptimizer(
        optimizers.Adam(0.01 * hvd.size()),
        backward_passes_per_step=3,
        average_aggregated_gradients=True,
    )
    model, _ = fit(optimizer, data=rows(48), batch_size=4)
    iterations = int(model.optimizer.iterations)
    return {"weights": model.get_weights(), "iterations": iterations}


@fit_script
def accumulate_sum():
    """Gradients of three batches are summed before each allreduce."""
    sgd = optimizers.SGD(0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=3)
    model, _ = fit(optimizer, data=rows(48), batch_size=4)
    iterations = int(model.optimizer.iterations)
    return {"weights": model.get_weights(), "iterations": iterations}


@fit_script
def batch_norm():
    """Moving statistics of a BatchNormalization are each rank's own."""
    norm = layers.BatchNormalization()
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    return weights_of(optimizer, layers.Dense(3), norm)


@fit_script
def sync_batch_norm():
    """`hvd.SyncBatchNormalization`: moments of the batches of all ranks."""
    norm = hvd.SyncBatchNormalization()
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    return weights_of(optimizer, layers.Dense(3), norm)


@fit_script
def clipnorm():
    """Clipping sees the average of all ranks."""
    x, y = rows()
    optimizer = optimizers.SGD(learning_rate=0.1 * hvd.size(), clipnorm=0.1)
    return weights_of(hvd.DistributedOptimizer(optimizer), data=(x, 10 * y))


def _of_words(optimizer):
    words = np.random.RandomState(3).randint(0, 7, (24, 3))
    y = words.sum(axis=1, keepdims=True).astype("float32") / 10
    before = layers.Embedding(7, 2), layers.Flatten()
    given = {"data": (words, y), "batch_size": 4, "callbacks": [broadcast()]}
    return weights_of(optimizer, *before, **given)


@fit_script
def embedding():
    """Gradients of an `Embedding` are rows of a table, some repeated."""
    return _of_words(hvd.DistributedOptimizer(optimizers.SGD(learning_rate=0.1)))


@fit_script
def embedding_dense():
    """`sparse_as_dense=True`: the table is sent whole, and Adam moves all its rows."""
    adam = optimizers.Adam(learning_rate=0.01)
    return _of_words(hvd.DistributedOptimizer(adam, sparse_as_dense=True))


@fit_script
def half_precision():
    """Compression to 16 bits."""
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(learning_rate=0.1), compression=hvd.Compression.fp16
    )
    hidden = layers.Dense(3, activation="tanh")
    return weights_of(optimizer, hidden, callbacks=[broadcast()])


@fit_script
def op_sum():
    """`op=hvd.Sum`: gradients of the ranks are added, not averaged."""
    sgd = optimizers.SGD(learning_rate=0.05, momentum=0.9)
    return weights_of(hvd.DistributedOptimizer(sgd, op=hvd.Sum))


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
    optimizer = hvd.DistributedOptimizer(optimizers.Adam(learning_rate=rate))
    callbacks = [broadcast(), schedule]
    model, logs = fit(optimizer, batch_size=4, epochs=3, callbacks=callbacks)
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
    model, logs = fit(hvd.DistributedOptimizer(sgd), **given)
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
    model, logs = fit(hvd.DistributedOptimizer(sgd), **given)
    return {"weights": model.get_weights(), "logs": logs}


@fit_script
def tuned():
    """`gradient_predivide_factor` and `num_groups`, which change rounding only."""
    adam = optimizers.Adam(learning_rate=0.01 * hvd.size())
    how = {"gradient_predivide_factor": 2.0, "num_groups": 2}
    return weights_of(hvd.DistributedOptimizer(adam, **how), layers.Dense(3))


@fit_script
def allreduce_callback():
    """A callback of one's own averages what each rank has measured."""
    x, y = rows()
    means = []

    class Average(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            mine = slice(hvd.rank(), None, hvd.size())
            error = np.abs(self.model.predict(x[mine], verbose=0) - y[mine]).mean()
            both = hvd.allreduce(np.array([error, logs["loss"]]), name="errors")
            means.append(both.numpy())
            logs["mean_error"] = float(both[0])

    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1))
    given = [Average(), hvd.callbacks.MetricAverageCallback()]
    model, logs = fit(optimizer, epochs=3, callbacks=given)
    return {"weights": model.get_weights(), "means": means, "logs": logs}


@fit_script
def load_model():
    """The optimizer of a whole model from a file averages, and goes on."""
    x, y = rows()

    def train(model):
        mine = slice(hvd.rank(), None, hvd.size())
        given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x[mine], y[mine], callbacks=[broadcast()], **given)

    adam = optimizers.Adam(learning_rate=0.01 * hvd.size())
    loss = losses.MeanSquaredError(reduction="sum")
    model = ready(hvd.DistributedOptimizer(adam), loss=loss)
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
        hvd.DistributedOptimizer(optimizers.SGD(learning_rate=0.3 * hvd.size())),
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
        hvd.DistributedOptimizer(optimizers.SGD(0.1)),
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
    adagrad = optimizers.Adagrad(0.1 * hvd.size())
    model = ready(hvd.DistributedOptimizer(adagrad))
    for batch in range(4):
        first = batch * 8 + hvd.rank() * 4
        model.train_on_batch(x[first : first + 4], y[first : first + 4])
    return {"weights": model.get_weights()}


record(**{name: train() for name, train in FITS.items()})
