"""Elastic state on ranks that stay: commit, restore, and callbacks that count."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
start(model)
lr = 0.05
opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr * hvd.size()))
model.compile(optimizer=opt, loss="mse")


def on_state_reset():
    """Scale the rate by the new number of ranks."""
    model.optimizer.learning_rate = lr * hvd.size()


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
]


@hvd.elastic.run
def train(state):
    """Two epochs of what is left."""
    state.model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=4,
        callbacks=callbacks,
        epochs=2 - state.epoch,
        shuffle=False,
        verbose=0,
    )


train(state)
trained = model.get_weights()
state.commit()
start(model, seed=9)
state.restore()
record(weights=trained, restored=model.get_weights(), counts=[state.epoch, state.batch])
