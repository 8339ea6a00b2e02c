"""Clipping sees the average of all ranks."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = tf.keras.optimizers.SGD(learning_rate=0.1 * hvd.size(), clipnorm=0.1)
model.compile(hvd.DistributedOptimizer(opt), "mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    10 * y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights())
