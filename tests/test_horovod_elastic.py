"""`keras_dist.horovod.elastic` under `horovodrun`, whose ranks come and go."""

import sys
from pathlib import Path

import pytest
from launch import launch

_SCRIPT = """
import os, sys, time
import keras
import numpy as np
import keras_dist.horovod as hvd

hosts, mode = sys.argv[1:]
hvd.init()
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size()))
model.compile(optimizer, "mse")
x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
y = x.sum(axis=1)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)

def on_reset():
    model.optimizer.learning_rate = 0.01 * hvd.size()

state.register_reset_callbacks([on_reset])

class Change(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {state.epoch}: {hvd.size()} ranks", flush=True)
        if state.epoch == 2 and mode == "grow":
            open(hosts, "w").write("localhost:2\\n")
        if state.epoch == 2 and mode == "fail" and hvd.rank() == 1:
            os._exit(1)
        time.sleep(0.5)

@hvd.elastic.run
def train(state):
    model.fit(x, y, batch_size=8, epochs=20 - state.epoch, verbose=0, callbacks=[
        Change(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
    ])

train(state)
weights = hvd.allgather_object(model.get_weights()[0].tolist())
rate = float(model.optimizer.learning_rate)
print(f"end: {state.epoch} epochs, {weights.count(weights[0])} equal, {rate:.2f}")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "hosts", "ranks", "end"),
    [
        ("grow", "localhost:1\n", 1, "end: 20 epochs, 2 equal, 0.02"),
        ("fail", "localhost:1\n127.0.0.1:1\n", 2, "end: 20 epochs, 1 equal, 0.01"),
    ],
)
def test_a_training_goes_on_when_ranks_come_and_go(tmp_path, mode, hosts, ranks, end):
    """With the state of the last commit, and no epoch twice or left out."""
    script, names = tmp_path / "script.py", tmp_path / "hosts.txt"
    script.write_text(_SCRIPT)
    names.write_text(hosts)
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {names}\n")
    discover.chmod(0o755)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [str(horovodrun), "--network-interfaces", "lo", "-np", str(ranks)]
    command += ["--min-np", "1", "--max-np", "2"]
    command += ["--host-discovery-script", str(discover)]
    command += [sys.executable, str(script), str(names), mode]
    done = launch(command, ranks=None, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(end) == (2 if mode == "grow" else 1)
    of_first = [line for line in done.stdout.splitlines() if line.startswith("[0]")]
    epochs = [line.partition("epoch ")[2].split(":")[0] for line in of_first]
    assert [int(epoch) for epoch in epochs if epoch.isdecimal()] == list(range(20))
    assert "1 ranks" in done.stdout and "2 ranks" in done.stdout
