"""A training of which one rank misbehaves, by a variable: how, where, which rank."""

import os
import resource
import signal
import subprocess
import sys
import time

import keras
import numpy as np

import keras_dist

HOW, WHERE, RANK = os.environ["MISBEHAVES"].split()


def sleep_for_ever():
    time.sleep(1000)


def fail():
    subprocess.Popen(["setsid", "sleep", "1000"])  # a daemon of this rank's
    print("fails at", time.time(), flush=True)
    if HOW == "exit":
        os._exit(3)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        np.ones(2**34)
    raise KeyError("tea")


def reach(place):
    if (place, keras_dist.rank()) == (WHERE, int(RANK)):
        {"sleep": sleep_for_ever, "leave": sys.exit}.get(HOW, fail)()


class Model(keras.Sequential):
    def train_step(self, data):
        if "step" in WHERE:
            reach(f"step-{int(self.optimizer.iterations) + 1}")
        return super().train_step(data)


class Reaches(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        reach(f"epoch-{epoch + 1}")

    def on_train_batch_end(self, batch, logs=None):
        reach(f"callback-{batch + 1}")


def batches():
    for number in range(100):
        # Each rank reads what it trains on; batch 20 is read by all of them.
        reach(f"batch-{number}")
        yield np.ones((4, 2)), np.ones(4)


model = Model([keras.Input((2,)), keras.layers.Dense(1)])
# Compiled where it can be: only the stacks show whether a graph is in a collective.
model.compile("sgd", "mse", run_eagerly="step" in WHERE, jit_compile=False)
data = {"x": np.ones((200, 2)), "y": np.ones(200), "batch_size": 4, "epochs": 4}
if "batch" in WHERE:
    data = {"x": batches()}
keras_dist.dist_fit(model, **data, verbose=0, callbacks=[Reaches()])
