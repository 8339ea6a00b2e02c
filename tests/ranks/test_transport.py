"""What each transport sends: all sizes and dtypes, gradients, what does not fit."""

import contextlib
import os
import time

import numpy as np
import pytest
import tensorflow as tf
from harness.claims import gather_errors
from harness.launching import allow

import keras_dist
from keras_dist import comm
from keras_dist.comm import runtime, transport

pytestmark = [pytest.mark.several_ranks, pytest.mark.three_ranks]


def run(function, tensor, name, **options):
    return transport.run(function, runtime.connected_link(), tensor, name, **options)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 2**21 + 3])
def test_collectives_of_any_size_are_those_of_numpy(
    world, count, in_graph, monkeypatch
):
    """Also of nothing, and of what travels in several parts."""
    module = "keras_dist.comm.tensorflow_transport"
    monkeypatch.setattr(f"{module}._MOST_BYTES", 2**21)
    call = tf.function(run) if in_graph else run
    own = np.arange(count, dtype="float32") % 7 + world.rank
    everyone = [np.arange(count) % 7 + rank for rank in range(world.size)]
    name = f"sizes.{count}.{in_graph}"
    summed = call("allreduce", tf.constant(own), f"{name}.sum")
    assert summed.numpy().tolist() == np.sum(everyone, axis=0).tolist()
    root = world.size - 1
    sent = call("broadcast", tf.constant(own), f"{name}.root", root_rank=root)
    assert sent.numpy().tolist() == everyone[root].tolist()
    rows = [each[: count // (1 + rank)] for rank, each in enumerate(everyone)]
    mine = tf.constant(own[: count // (1 + world.rank)])
    gathered = call("allgather", mine, f"{name}.rows")
    assert gathered.numpy().tolist() == np.concatenate(rows).tolist()


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64"],
)
def test_rows_of_any_dtype_are_gathered(world, dtype):
    """Of another number on each rank, also none."""
    own = tf.cast(tf.reshape(tf.range(6 * world.rank), [-1, 3]), dtype)
    found = run("allgather", own, f"rows.{dtype}")
    rows = [np.arange(6 * rank).reshape(-1, 3) for rank in range(world.size)]
    expected = np.concatenate(rows).astype(dtype)
    assert found.dtype == dtype and found.numpy().tolist() == expected.tolist()


def test_sums_are_the_same_bits_on_all_ranks(world):
    """Whatever the order in which they are taken: replicas stay equal."""
    own = np.random.default_rng(world.rank).normal(size=2**21 + 1).astype("float32")
    for count in (5, 1000, len(own)):
        total = run("allreduce", tf.constant(own[:count]), "bits").numpy()
        assert len(set(keras_dist.gather(total.tobytes()))) == 1


def test_collectives_have_the_gradients_of_what_they_do(world):
    """Of a sum, of rows of all ranks, and of the values of one rank."""
    x = tf.constant([[1.0 + world.rank, 2.0]] * (1 + world.rank))
    weight = 1.0 + world.rank
    total = sum(1.0 + rank for rank in range(world.size))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        summed = weight * run("allreduce", x[0], "gradient.sum")
        rows = weight * run("allgather", x, "gradient.rows")
        sent = weight * run("broadcast", x[0], "gradient.root", root_rank=1)
    assert tape.gradient(summed, x).numpy()[0].tolist() == [total] * 2
    mean = [[total / world.size] * 2] * len(x)  # as Horovod has it
    assert tape.gradient(rows, x).numpy().tolist() == mean
    expected = [total / world.size if world.rank == 1 else 0.0] * 2
    assert tape.gradient(sent, x).numpy()[0].tolist() == expected


def test_tensors_that_do_not_fit_are_an_error_on_all_ranks(world):
    """And then the ranks go on."""
    link = runtime.connected_link()

    def send():
        with comm.raise_on_all():
            link.send("broadcast", tf.zeros([2 + world.rank]), "misfit", root_rank=0)

    errors = gather_errors(tf.errors.OpError, send)
    assert all("ismatched" in text for _, text in errors), errors
    assert keras_dist.gather(world.rank) == list(range(world.size))


def test_a_forked_process_leaves_the_links_alone(world):
    """It ends, with its own exit code, and the ranks go on."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(RuntimeError):
            keras_dist.gather(0)
            os._exit(1)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert keras_dist.sum(1) == world.size


def test_an_error_ends_a_graph_that_waits_for_this_rank(world):
    """Within seconds, and without an end of the process."""
    step = tf.function(lambda x: keras_dist.sum(x))
    step(tf.ones([3]))
    begin = time.monotonic()

    def fail():
        with comm.raise_on_all():
            if world.rank == 0:
                raise KeyError("tea")
            step(tf.ones([3]))

    errors = gather_errors(Exception, fail)
    assert time.monotonic() - begin < allow(5)
    assert [kind for kind, _ in errors] == ["KeyError"] + ["RankError"] * (
        world.size - 1
    )
    assert step(tf.ones([3])).numpy().tolist() == [world.size] * 3


def test_sums_of_an_accelerator_are_ordered_by_their_graph(world, monkeypatch):
    """As over NCCL, by the same graph on CPUs."""
    link = runtime.connected_link()
    if link.is_horovod:
        return
    monkeypatch.setattr(link, "accelerator", ("CPU:0", "ring"))

    @tf.function
    def sums(x):
        return [link.send("allreduce", x * k, f"order.{k}") for k in range(5)]

    found = sums(tf.ones([3]))
    nodes = sums.get_concrete_function(tf.ones([3])).graph.as_graph_def().node
    reduces = [node for node in nodes if node.op == "CollectiveReduceV2"]
    assert sum(any(i.startswith("^") for i in node.input) for node in reduces) == 4
    assert [each.numpy()[0] for each in found] == [k * world.size for k in range(5)]
