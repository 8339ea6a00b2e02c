"""Resuming: the first rank looks for the last checkpoint, and broadcasts its epoch."""

import argparse
import os

import keras
from results import record, rows, start

import keras_dist.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.weights.h5")
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args([])

hvd.init()
x, y = rows()


def train(epochs):
    """Go on from the last checkpoint there is."""
    # If set > 0, will resume training from a given checkpoint.
    resume_from_epoch = 0
    for try_epoch in range(args.epochs, 0, -1):
        if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
            resume_from_epoch = try_epoch
            break
    # Horovod: broadcast resume_from_epoch from rank 0 (which will have
    # checkpoints) to other ranks.
    resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch")

    model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(4,))])
    start(model)
    opt = hvd.DistributedOptimizer(
        keras.optimizers.SGD(learning_rate=0.05 * hvd.size())
    )
    model.compile(loss="mse", optimizer=opt)
    if resume_from_epoch > 0:
        model.load_weights(args.checkpoint_format.format(epoch=resume_from_epoch))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if hvd.rank() == 0:
        callbacks.append(
            keras.callbacks.ModelCheckpoint(
                args.checkpoint_format, save_weights_only=True
            )
        )
    model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=8,
        callbacks=callbacks,
        epochs=epochs,
        initial_epoch=int(resume_from_epoch),
        shuffle=False,
        verbose=1 if hvd.rank() == 0 else 0,
    )
    return int(resume_from_epoch), model.get_weights()


first, _ = train(2)
hvd.allreduce([0], name="Barrier")
second, weights = train(args.epochs)
record(epochs=[first, second], weights=weights)
