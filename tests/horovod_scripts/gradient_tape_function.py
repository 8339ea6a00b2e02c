"""Horovod's recipe for a loop of one's own: the broadcast is in the traced function."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
opt = tf.keras.optimizers.Adam(0.001 * hvd.size())
loss = tf.losses.MeanSquaredError()


@tf.function
def training_step(images, labels, first_batch):
    """One step on a batch of this rank."""
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    # Note: broadcast should be done after the first gradient step to ensure optimizer
    # initialization.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return value


losses = []
for batch in range(4):
    mine = slice(batch * 8 + hvd.rank(), batch * 8 + 8, hvd.size())
    losses.append(float(training_step(x[mine], y[mine], batch == 0)))
record(weights=model.get_weights(), losses=losses)
