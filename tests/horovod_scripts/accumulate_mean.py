"""Gradients of three batches are averaged before each allreduce."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows(48)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(0.01 * hvd.size()),
    backward_passes_per_step=3,
    average_aggregated_gradients=True,
)
model.compile(optimizer=opt, loss="mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=4,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights(), iterations=int(model.optimizer.iterations))
