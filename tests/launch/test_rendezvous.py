"""Ranks that srun, torchrun, Ray Train or Kubernetes start find each other.

Each process here has the variables that such a launcher sets, and no launcher of ours.
"""

import json
import socket
import time

import pytest
from harness.forked import slurm, torchrun
from harness.launching import MISBEHAVES

SHORT = {"KERAS_DIST_RANKS_SECONDS": "2"}

# Prints the weights' digest: the same for all launchers, and on all ranks.
TRAIN = """
import hashlib, os, random
import keras, numpy as np
import keras_dist
random.seed()
np.random.set_bit_generator(np.random.MT19937())  # as in a process that is not forked
keras_dist.init()
print("drawn", random.random(), np.random.rand())
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
options = {"batch_size": 6, "epochs": 2, "batch": "global", "verbose": 0}
keras_dist.dist_fit(model, x, x[:, :1], **options)
world = keras_dist.init()
assert keras_dist.gather(world.rank) == list(range(world.size))
weights = b"".join(w.numpy().tobytes() for w in model.weights)
numbers = world.rank, world.size, world.local_rank, world.local_size
print("trained", *numbers, hashlib.sha256(weights).hexdigest(), flush=True)
keras_dist.gather("done")
os._exit(0)
"""


def two_torchruns(rank, size, port):
    """One for each rank on the same host: each has a local rank 0."""
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return torchrun(rank, size, port) | own


def tf_config(rank, size, port):
    """The workers of Ray Train."""
    workers = [f"127.0.0.1:{port}", *["127.0.0.1:1"] * (size - 1)]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def pods(rank, size, port):
    """The pods of an Indexed Job, which are hosts."""
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "KERAS_DIST_NNODES": str(size),
        "KERAS_DIST_RDZV": f"localhost:{port}",
    }


@pytest.mark.parametrize(
    "variables",
    [
        slurm,
        pytest.param(torchrun, marks=pytest.mark.long),
        two_torchruns,
        tf_config,
        pods,
    ],
    ids=lambda variables: variables.__name__,
)
def test_ranks_meet_and_train_one_model(run_ranks, variables):
    """Two processes have the same weights and first draws, and know all ranks."""
    done = run_ranks(variables, [0, 1], 2, TRAIN)
    printed = [line for _, out in done for line in out.splitlines()]
    lines = [line for line in printed if line.startswith("trained")]
    assert [code for code, _ in done] == [0, 0], done
    assert len({line for line in printed if line.startswith("drawn")}) == 1, printed
    assert [line.split()[1:3] for line in lines] == [["0", "2"], ["1", "2"]]
    assert len({line.split()[-1] for line in lines}) == 1
    is_one_host = variables in (slurm, torchrun, tf_config)
    local = ["1", "2"] if is_one_host else ["0", "1"]
    assert lines[1].split()[3:5] == local


def disagree(rank, size, port):
    """Rank 1 was started with another size."""
    return torchrun(rank, size, port) | {"WORLD_SIZE": str(size + rank)}


@pytest.mark.parametrize(
    ("variables", "ranks", "size", "texts"),
    [
        # Named by its number, and with the hosts of the others.
        (
            torchrun,
            [0, 1],
            3,
            ["Not all ranks have arrived", "missing: rank 2", "2 on "],
        ),
        # Rank 0 has ended, or never began.
        (torchrun, [1], 2, ["first host cannot be reached"]),
        (disagree, [0, 1], 2, ["disagree on their number"]),
    ],
    ids=["missing", "no first", "disagree"],
)
def test_ranks_that_cannot_meet_are_an_error(run_ranks, variables, ranks, size, texts):
    """On every rank that has come."""
    for code, out in run_ranks(variables, ranks, size, TRAIN, env=SHORT):
        assert code == 1
        for text in texts:
            assert text.replace("2 on ", f"2 on {socket.gethostname()}") in out, out


def test_a_port_in_use_is_an_error_that_names_it(run_ranks):
    """Another program listens there."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        [(code, out)] = run_ranks(tf_config, [0], 2, TRAIN, port=port)
    assert code == 1 and f"cannot listen at 127.0.0.1:{port}." in out, out


FAIL = """
import os
import keras_dist
if keras_dist.rank() == int(os.environ["FAILS"]):
    raise KeyError("tea")
keras_dist.gather("never")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_on_the_others_and_to_torchrun(
    run_ranks, tmp_path, rank
):
    """Its traceback on itself, a line on the others, and torchrun's error file."""

    def variables(rank, size, port):
        file = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"{rank}.json")}
        return torchrun(rank, size, port) | file

    done = run_ranks(variables, [0, 1], 2, FAIL, env={"FAILS": f"{rank}"})
    assert [code for code, _ in done] == [1, 1]
    failed, other = done[rank][1], done[1 - rank][1]
    assert "KeyError: 'tea'" in failed and "Traceback" in failed
    line = f"Rank {rank} on {socket.gethostname()} has failed; its traceback is the"
    assert line in other and line not in failed, other
    message = json.loads((tmp_path / f"{rank}.json").read_text())["message"]
    assert message["message"] == "KeyError: 'tea'"
    assert "Traceback" in message["extraInfo"]["py_callstack"]


DIES = (
    """
import os
from keras_dist.launch.meeting import Meeting
def die(meeting, *_):
    if len(meeting.find("join")) > 1:
        os._exit(9)
    note(meeting, *_)
note = Meeting._note
if os.environ["RANK"] == "0":
    Meeting._note = die
"""
    + TRAIN
)


def test_a_first_rank_that_ends_before_all_have_come_is_named(run_ranks):
    """Within seconds, on a rank that waits for its answer."""
    begin = time.monotonic()
    env = {"KERAS_DIST_LOST_SECONDS": "3"}
    (first, _), (code, out) = run_ranks(torchrun, [0, 1], 3, DIES, env=env)
    assert (first, code) == (9, 1)
    assert "The first rank was lost" in out, out
    assert time.monotonic() - begin < 60


def test_a_rank_that_leaves_while_others_train_is_named_on_them(run_ranks):
    """By `sys.exit(0)` on the rank with the store, which stays for a moment."""
    env = {"MISBEHAVES": "leave epoch-3 0"}
    ended = run_ranks(torchrun, [0, 1], 2, MISBEHAVES.read_text(), env=env)
    (code, _), (failed, second) = ended
    assert (code, failed) == (0, 1)
    text = "ended with no error in epoch 3 while others were training."
    assert f"Rank 0 on {socket.gethostname()} {text}" in second, second
