"""A callback that reads and sets the rate by `K.get_value` and `K.set_value`."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
import tensorflow.keras.backend as K
from results import record, rows, start

hvd.init()


class Halve(tf.keras.callbacks.Callback):
    """Halves the rate after each epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        if not hasattr(self.model.optimizer, "lr"):
            raise ValueError('Optimizer must have a "lr" attribute.')
        lr = float(K.get_value(self.model.optimizer.lr))
        self.rates.append(lr)
        K.set_value(self.model.optimizer.lr, lr / 2)


x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
optimizer = tf.keras.optimizers.SGD(lr=0.1 * hvd.size(), momentum=0.9, nesterov=True)
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer=optimizer, loss="mse")
K.set_value(model.optimizer.lr, 0.05 * hvd.size())
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
    weights=model.get_weights(), rates=halve.rates, last=K.get_value(model.optimizer.lr)
)
