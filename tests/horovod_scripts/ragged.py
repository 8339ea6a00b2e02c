"""Ranks with different numbers of rows, which count the same."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows(36)
mine = slice(0, 24) if hvd.rank() == 0 else slice(24, 36)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
model.compile(opt, "mse", metrics=["mae"])
history = model.fit(
    x[mine],
    y[mine],
    batch_size=8 if hvd.rank() == 0 else 4,
    epochs=2,
    shuffle=False,
    verbose=0,
    validation_data=(x[mine][:10], y[mine][:10]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
)
record(weights=model.get_weights(), logs=history.history)
