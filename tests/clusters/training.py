"""A small training that fails once, as torchrun and Ray Train start it.

As a script: `training.py FOLDER CASE`; the weights are written to FOLDER/weights.npy.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_dist


def train(folder, case):
    """Train to the end, or to what the case does in epoch 3.

    Args:
        folder: Where files go, and where a second start finds them.
        case: "once": rank 1 fails, but not again; "fail": each time; "sleep": rank 1
            sleeps for ever; "long": steps take a second; "": nothing; "plain": by
            `model.fit` of Keras, on one process.
    """

    class Misbehaves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if case == "long" and keras_dist.rank() == 0 and epoch == 2:
                print("epoch 3 begins", flush=True)
            if epoch < 2 or keras_dist.rank() != 1:
                return
            if case == "sleep":
                time.sleep(1000)
            if case == "fail" or (case == "once" and not (folder / "failed").exists()):
                (folder / "failed").touch()
                raise KeyError("tea")

        def on_train_batch_end(self, batch, logs=None):
            if case == "long":
                time.sleep(1)

    folder = Path(folder)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    options = {"batch_size": 6, "epochs": 5, "verbose": 0}
    if case != "plain":
        resume = {"batch": "global", "resume": str(folder / "checkpoints")}
        if (folder / "checkpoints").exists():
            print("goes on from a checkpoint", flush=True)
        callbacks = [Misbehaves()]
        keras_dist.dist_fit(
            model, x, x[:, :1], **options, **resume, callbacks=callbacks
        )
    else:
        model.fit(x, x[:, :1], **options)
    if keras_dist.rank() == 0:
        weights = [weight.numpy().ravel() for weight in model.weights]
        np.save(folder / "weights.npy", np.concatenate(weights))
        print(f"trained on {keras_dist.size()} ranks", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
