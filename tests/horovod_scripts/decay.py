"""An `InverseTimeDecay`, Keras 2's `decay=`: a rate that falls with each step."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = tf.keras.optimizers.SGD(
    learning_rate=tf.keras.optimizers.schedules.InverseTimeDecay(
        initial_learning_rate=0.1 * hvd.size(), decay_steps=1, decay_rate=0.1
    ),
    momentum=0.9,
)
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
