"""Ranks without progress end the job; ranks that work do not."""

import re

import pytest
from harness.forked import torchrun
from harness.launching import MISBEHAVES, launch, prefix

from keras_dist.launch.monitor import record
from keras_dist.launch.monitor.watchdog import EXIT_CODE, Watchdog

ENDS_SOON = {"KERAS_DIST_STALL_SECONDS": "3"}


@pytest.mark.parametrize(
    ("where", "ranks", "launcher", "transport"),
    [
        ("callback-7", 2, "keras-dist", "horovod"),
        ("callback-7", 2, "keras-dist", "tensorflow"),
        pytest.param("batch-20", 3, "keras-dist", "horovod", marks=pytest.mark.long),
        pytest.param("callback-7", 2, "horovodrun", "horovod", marks=pytest.mark.long),
        pytest.param("batch-20", 3, "horovodrun", "tensorflow", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_sleeps_for_ever_is_named(where, ranks, launcher, transport):
    """All print their stacks; the line in which it sleeps comes first.

    Under any launcher: the ranks report their status through its store.
    """
    env = ENDS_SOON | {"MISBEHAVES": f"sleep {where} 1"}
    env["KERAS_DIST_TRANSPORT"] = transport
    done = launch([MISBEHAVES], ranks=ranks, launcher=launcher, env=env)
    is_ours, lines = launcher == "keras-dist", f"\n{done.stderr}"
    for rank in range(ranks):
        begin = prefix(rank) if is_ours else f"[{rank}]<stderr>:"
        for text in ("keras_dist: no rank has made progress for 3 s", "Stack of the"):
            assert f"\n{begin}{text}" in lines
    missing = r"Rank 1 is missing: in step \d+ of .* in sleep_for_ever"
    assert re.search(missing, lines), lines
    if not is_ours:
        assert done.returncode != 0
        return
    assert done.returncode == EXIT_CODE, lines
    report = lines[lines.index("keras-dist: rank") :]
    assert re.match(r"keras-dist: rank 1 failed first, in step \d+ of epoch 1", report)
    assert "in sleep_for_ever" in report and "Stack of" not in report  # once is enough


_COLLECTIVES = """
import keras_dist
keras_dist.sum(1) if keras_dist.rank() else keras_dist.gather("tea")
"""


def test_ranks_in_different_collectives_are_named(run_ranks):
    """Each prints the collective it waits in, and the line of the call."""
    ended = run_ranks(torchrun, [0, 1], 2, _COLLECTIVES, env=ENDS_SOON)
    # The rank that ends first closes its connection, which may be the other's error.
    assert EXIT_CODE in [code for code, _ in ended]
    for code, out in ended:
        assert code != 0, out
        assert "Waiting in the collective keras_dist.gather," in out
        assert re.search(r"Waiting in the collective keras_dist\.sum, .*: rank 1", out)
        assert (
            'keras_dist.sum(1) if keras_dist.rank() else keras_dist.gather("tea")'
            in out
        )


_WORKS = """
import os, subprocess, sys, threading, time
import keras_dist

LIMIT = 2
rank = keras_dist.init(stall_limit=LIMIT).rank

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

if rank == 0:
    compute(2 * LIMIT)  # as validation on the first rank does
keras_dist.sum(1)
if rank == 1:  # as workers that read data do
    code = "import time; t = time.monotonic()\\nwhile time.monotonic() < t + 4: pass"
    subprocess.run([sys.executable, "-c", code])
keras_dist.sum(1)
if rank == 0:  # as `less` does, which somebody reads
    reader, writer = os.pipe()
    threading.Timer(2 * LIMIT, lambda: [os.read(reader, 2**16) for _ in "12"]).start()
    screen = os.dup(1)
    os.dup2(writer, 1)
    os.write(1, bytes(2**17))
    os.dup2(screen, 1)
keras_dist.sum(1)
print("done", flush=True)
"""


def test_ranks_that_work_are_left_alone(run_ranks):
    """A rank that computes, or waits for a child or for somebody to read its output."""
    done = run_ranks(torchrun, [0, 1], 2, _WORKS)
    assert [(code, out.strip()) for code, out in done] == [(0, "done")] * 2


_ALONE = """
import sys, time
import keras, keras_dist, numpy as np

with keras_dist.first_rank() as is_first:
    time.sleep(4 * is_first)  # as a download does

@keras_dist.first_rank_only
class Uploads(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("uploads", epoch, flush=True)
        time.sleep(1000 if epoch else 4)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = {"x": np.ones((16, 2)), "y": np.ones(16), "epochs": 2, "verbose": 0}
keras_dist.dist_fit(model, **data, callbacks=[Uploads()])
"""


def test_what_the_first_rank_does_alone_has_a_limit_of_its_own(run_ranks):
    """In a block, or a callback, that waits for a network, say."""
    variable = "KERAS_DIST_FIRST_RANK_SECONDS"
    env = {"KERAS_DIST_STALL_SECONDS": "2", variable: "7"}
    (code, out), (other_code, _) = run_ranks(torchrun, [0, 1], 2, _ALONE, env=env)
    assert EXIT_CODE in (code, other_code)
    assert "uploads 0" in out and "uploads 1" in out, out
    assert "no rank has made progress for 7 s" in out, out
    assert f"raise the limit: {variable}=35" in out


def test_the_end_of_a_block_of_one_rank_is_progress(monkeypatch):
    """Or the time of the block would count by the limit of all other code."""
    dog = Watchdog(rank=0, size=2, limit=2.0, ignored_threads=[])
    for now, is_alone in ((1000.0, True), (1004.0, True), (1008.0, False)):
        monkeypatch.setattr(record.here, "is_alone", is_alone)
        dog._note_progress(now)
        assert dog._last_progress == (1000.0 if is_alone else now)
        assert dog.publish(0.0)["is_alone"] == is_alone


def test_a_value_that_is_no_heartbeat_does_not_count(variables, monkeypatch):
    """Ranks sign nothing here: a stranger's value must not end the watchdog."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    first, second = (
        Watchdog(rank=rank, size=2, limit=1.0, ignored_threads=[]) for rank in range(2)
    )
    status = second.publish(0.0)
    assert first._read_statuses(0.0) == {1: status}
    for wrong in ({"x": 1}, {"idle": "9"}, {"beat": []}, {"code": {}}, {"position": 1}):
        value = wrong if "x" in wrong else status | wrong
        second._store.put("1", value)
        assert first._read_statuses(0.0) == {1: None}, wrong
