"""A rate that is a function of the epoch, set at each batch."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd
from keras_dist.horovod.callbacks import LearningRateScheduleCallback

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
model.compile(
    hvd.DistributedOptimizer(tf.keras.optimizers.Adam(learning_rate=0.01 * hvd.size())),
    "mse",
)
history = model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=4,
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        LearningRateScheduleCallback(
            initial_lr=0.01 * hvd.size(),
            multiplier=lambda epoch: 0.5**epoch,
            staircase=False,
            momentum_correction=False,
            steps_per_epoch=4,
        ),
    ],
)
record(weights=model.get_weights(), rates=history.history["lr"])
