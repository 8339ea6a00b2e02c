"""Warm-up of a rate with momentum, which is corrected when the rate changes."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
initial_lr = 0.02 * hvd.size()
opt = tf.keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(opt), loss="mse")
history = model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=4,
    epochs=4,
    shuffle=False,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=initial_lr, warmup_epochs=3, verbose=1
        ),
    ],
)
record(weights=model.get_weights(), logs=history.history)
