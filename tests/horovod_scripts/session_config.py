"""A session of TensorFlow 1, which pins the GPU."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from results import record, rows, start

hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))

x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.RMSprop(0.01 * hvd.size()))
model.compile(optimizer=opt, loss="mae")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights())
