"""`SGD(lr=…, decay=…)`: a rate that falls with each step."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from results import record, rows, start

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = tf.keras.optimizers.legacy.SGD(lr=0.1 * hvd.size(), decay=0.1, momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(opt), loss="mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
record(weights=model.get_weights())
