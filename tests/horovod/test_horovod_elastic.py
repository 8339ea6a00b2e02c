"""`keras_dist.horovod.elastic` where ranks come and go: tests/hosts has more hosts."""

import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from launch import launch

from keras_dist.horovod import elastic

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
        is_first_start = "KERAS_DIST_RESTART" not in os.environ
        if state.epoch == 2 and mode == "fail" and hvd.rank() == 1 and is_first_start:
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
    command = [str(horovodrun), "--gloo", "--network-interfaces", "lo"]
    command += ["-np", str(ranks)]
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


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_started_anew_go_on_from_the_last_commit(tmp_path, ranks):
    """Under `keras-dist run --restarts`; no epoch is left out, and nothing remains."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]
    command += ["--restarts", "1", str(script), str(tmp_path / "names"), "fail"]
    env = {**os.environ, "TMPDIR": tempfile.mkdtemp(dir=tmp_path)}
    done = launch(command, ranks=None, timeout=300, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    end = f"end: 20 epochs, {ranks} equal, {0.01 * ranks:.2f}"
    assert done.stdout.count(end) == ranks
    assert "start 2 of at most 2" in done.stderr
    of_first = [line for line in done.stdout.splitlines() if line.startswith("[0]")]
    epochs = [line.partition("epoch ")[2].split(":")[0] for line in of_first]
    found = [int(epoch) for epoch in epochs if epoch.isdecimal()]
    assert found in (list(range(20)), [0, 1, 2, *range(2, 20)])
    assert list(Path(env["TMPDIR"]).iterdir()) == []


class _Forged:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.write_text, (self._path, "was here")


def test_commits_are_neither_read_from_nor_written_to_what_others_have_made(
    tmp_path, monkeypatch
):
    """A folder of the job's name: a link, open to others, or another user's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in (("JOB_ab12", "1"), ("JOB_ab12_0", "1"), ("RESTART", "1")):
        monkeypatch.setenv(f"KERAS_DIST_{name}", value)
    secret, read, traps = tmp_path / "secret", tmp_path / "read", []
    secret.write_text("mine")
    secret.chmod(0o600)
    for name in ("commits", "lasting.0", "lasting.1"):
        traps.append(tmp_path / f"keras_dist.ab12.{name}")
        traps[-1].mkdir()
        for file in ("0", "0.new"):
            (traps[-1] / file).symlink_to(secret)
    traps[1].chmod(0o777)
    if os.getuid() == 0:
        os.chown(traps[2], 12345, 12345)
        traps[2].chmod(0o700)
    (tmp_path / "keras_dist.ab12.lasting.2").symlink_to(traps[0])
    elastic.save_commit(elastic.Commit(1, [np.arange(3)], {"epoch": 2}), 0)
    assert secret.read_text() == "mine"
    found = elastic.saved_commit(0)
    assert found.number == 1 and found.values == {"epoch": 2}
    (own,) = set(tmp_path.glob("keras_dist.ab12.lasting.*")) - {
        *traps,
        tmp_path / "keras_dist.ab12.lasting.2",
    }
    assert own.stat().st_mode & 0o777 == 0o700
    assert [(f.name, f.stat().st_mode & 0o777) for f in own.iterdir()] == [("0", 0o600)]
    elastic.save_commit(elastic.Commit(2, [], {"epoch": 3}), 0)
    assert elastic.saved_commit(0).number == 2
    shutil.rmtree(own)
    for trap in traps:
        (trap / "0").unlink()
        (trap / "0").write_bytes(pickle.dumps(_Forged(read)))
    assert elastic.saved_commit(0) is None and not read.exists()
