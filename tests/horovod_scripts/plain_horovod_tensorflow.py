"""What `horovod.tensorflow` itself has, in a script that uses Keras's fit."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05 * hvd.size()))
model.compile(loss="mse", optimizer=opt)
hvd.broadcast_variables(model.variables, root_rank=0)
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=4,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights())
