"""Averaged metrics are what ReduceLROnPlateau and EarlyStopping decide by."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows(40)
y = y + 0.5 * hvd.rank()  # the ranks would decide differently by themselves
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(learning_rate=0.3 * hvd.size()))
model.compile(optimizer=opt, loss="mse", metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    tf.keras.callbacks.ReduceLROnPlateau(
        monitor="val_loss", factor=0.2, patience=1, min_delta=0.02
    ),
    tf.keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, min_delta=0.02),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.CSVLogger("log.csv"))
history = model.fit(
    x[:32],
    y[:32],
    batch_size=8,
    epochs=10,
    shuffle=False,
    verbose=0,
    validation_data=(x[32:], y[32:]),
    callbacks=callbacks,
)
names = ("loss", "mae", "val_loss", "val_mae")
record(
    weights=model.get_weights(),
    logs={name: history.history[name] for name in names},
    rate=float(model.optimizer.learning_rate),
)
