"""`gradient_predivide_factor` and `num_groups`, which change rounding only."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential(
    [tf.keras.layers.Dense(3, input_shape=(4,)), tf.keras.layers.Dense(1)]
)
start(model)
opt = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(learning_rate=0.01 * hvd.size()),
    gradient_predivide_factor=2.0,
    num_groups=2,
)
model.compile(opt, "mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights())
