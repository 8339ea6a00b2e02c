"""A callback that reads and sets the rate of the optimizer."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()


class Halve(tf.keras.callbacks.Callback):
    """Halves the rate after each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        lr = float(self.model.optimizer.learning_rate)
        self.rates.append(lr)
        self.model.optimizer.learning_rate = lr / 2


x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
optimizer = tf.keras.optimizers.SGD(
    learning_rate=0.1 * hvd.size(), momentum=0.9, nesterov=True
)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer=optimizer, loss="mse")
model.optimizer.learning_rate = 0.05 * hvd.size()
halve = Halve()
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[halve],
)
record(
    weights=model.get_weights(),
    rates=halve.rates,
    last=float(model.optimizer.learning_rate),
)
