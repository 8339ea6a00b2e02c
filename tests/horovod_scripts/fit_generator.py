"""`fit_generator` and `evaluate_generator`, with workers and shared steps."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from results import record, rows, start

hvd.init()
x, y = rows(64)


def batches(size):
    """This rank's batches, for ever."""
    while True:
        for first in range(hvd.rank() * size, len(x), size * hvd.size()):
            yield x[first : first + size], y[first : first + size]


model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr=0.1))
model.compile(optimizer=opt, loss="mse", experimental_run_tf_function=False)
history = model.fit_generator(
    batches(8),
    8 // hvd.size(),
    2,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    workers=1,
    use_multiprocessing=False,
    verbose=0,
    initial_epoch=0,
)
score = hvd.allreduce(model.evaluate_generator(batches(8), 4, workers=1))
record(weights=model.get_weights(), logs=history.history, score=score)
