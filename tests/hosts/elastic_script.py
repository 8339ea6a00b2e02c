"""A script of Horovod's elastic mode: 12 epochs, on the ranks that are there.

    elastic_script.py FOLDER

`FOLDER/epoch.N` gets a line each time that this epoch was trained: the number of ranks,
and the host of the first one. Each epoch takes a second, so that hosts can come and go.
"""

import socket
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_dist.horovod as hvd

EPOCHS = 12

folder = Path(sys.argv[1])
hvd.init()
keras.utils.set_random_seed(3 + hvd.rank())
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size()))
model.compile(optimizer, "mse")
x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
y = x.sum(axis=1)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_reset():
    """Scale the rate by the new number of ranks."""
    model.optimizer.learning_rate = 0.01 * hvd.size()


state.register_reset_callbacks([on_reset])


class Paced(keras.callbacks.Callback):
    """Shows which epoch is over and how many ranks there are, and takes its time."""

    def on_epoch_end(self, epoch, logs=None):
        """A file for each epoch, with a line for each time it was trained."""
        if hvd.rank() == 0:
            with open(folder / f"epoch.{state.epoch}", "a") as file:
                file.write(f"{hvd.size()} {socket.gethostname()}\n")
        time.sleep(1)


@hvd.elastic.run
def train(state):
    """What is left of the epochs."""
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=EPOCHS - state.epoch,
        verbose=0,
        callbacks=[
            Paced(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
        ],
    )


train(state)
everyone = hvd.allgather_object([w.tolist() for w in model.get_weights()])
rate = float(model.optimizer.learning_rate)
print(
    f"end: rank {hvd.rank()} of {hvd.size()}, {state.epoch} epochs, "
    f"{everyone.count(everyone[0])} equal, {rate:.2f}, "
    f"{int(model.optimizer.iterations)} steps",
    flush=True,
)
