"""`fit` and `evaluate` of a generator, with shared steps."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows(64)


def batches(size):
    """This rank's batches, for ever."""
    while True:
        for first in range(hvd.rank() * size, len(x), size * hvd.size()):
            yield x[first : first + size], y[first : first + size]


model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(learning_rate=0.1))
model.compile(optimizer=opt, loss="mse")
history = model.fit(
    batches(8),
    steps_per_epoch=8 // hvd.size(),
    epochs=2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=0,
    initial_epoch=0,
)
score = hvd.allreduce(model.evaluate(batches(8), steps=4, verbose=0))
record(weights=model.get_weights(), logs=history.history, score=score)
