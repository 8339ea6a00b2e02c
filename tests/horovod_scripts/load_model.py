"""`hvd.load_model` of a file: its optimizer averages, and goes on."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()


def train(model, epochs):
    """Two batches of each epoch."""
    model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )


model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = tf.keras.optimizers.Adam(learning_rate=0.01 * hvd.size())
model.compile(
    hvd.DistributedOptimizer(opt), tf.keras.losses.MeanSquaredError(reduction="sum")
)
train(model, 2)
if hvd.rank() == 0:
    model.save("model.keras")
hvd.broadcast(0, 0, name="saved")

loaded = hvd.load_model("model.keras", compression=hvd.Compression.none)
rate = float(loaded.optimizer.learning_rate)
train(loaded, 2)
record(weights=loaded.get_weights(), rate=rate)
