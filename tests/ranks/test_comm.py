"""Collectives give every rank the same, for tensors and for Python objects."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import raises_everywhere
from harness.launching import allow

import keras_dist
from keras_dist import comm
from keras_dist.comm import transport
from keras_dist.errors import RankError, is_known

pytestmark = pytest.mark.three_ranks


def test_the_world_is_the_launchers(world):
    """Ranks are numbered from 0 and all of them are here."""
    assert keras_dist.gather(world.rank) == list(range(world.size))
    assert (keras_dist.rank(), keras_dist.size()) == (world.rank, world.size)
    assert world.local_size == world.size
    assert keras_dist.local_rank() == world.local_rank == world.rank
    assert keras_dist.local_size() == world.local_size
    assert keras_dist.init() is keras_dist.init()


@pytest.mark.several_ranks
def test_each_rank_keeps_to_its_own_cores(world):
    """With all of their threads; or every rank uses all cores, if they are too few."""
    own = os.sched_getaffinity(0)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    assert comm.device().threads == (threads or len(own))
    cpus = Path("/sys/devices/system/cpu")
    files = [cpus / f"cpu{cpu}/topology/thread_siblings_list" for cpu in own]
    by_rank = keras_dist.gather([file.read_text() for file in files])
    cores = {core for own in by_rank for core in own}
    if len(cores) < world.size:
        assert all(set(own) == cores for own in by_rank)
    else:
        assert sum(len(set(own)) for own in by_rank) == len(cores)
        assert len({len(set(own)) for own in by_rank}) == 1


@pytest.mark.several_ranks
@pytest.mark.over_horovod
def test_the_thread_of_horovod_does_not_preempt_those_of_gloo():
    """It alone has the batch scheduling policy."""
    policies = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            policies.append(os.sched_getscheduler(thread))
    assert policies.count(os.SCHED_BATCH) == 1
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.several_ranks
def test_a_tensor_does_not_wait_for_the_end_of_a_cycle(world):
    """Of 200 ms here, so that 200 sums would take 40 s."""
    begin = time.monotonic()
    for number in range(200):
        assert keras_dist.sum(np.float32(number)) == number * world.size
    assert time.monotonic() - begin < allow(20)


_HELPER = """
import keras_dist
print(keras_dist.rank(), keras_dist.size())
try:
    keras_dist.gather(0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.two_ranks
def test_a_process_that_a_rank_starts_is_no_rank(world):
    """It knows rank and size, keeps its cores, has no collectives; nothing hangs."""
    if world.rank == 0:
        helper = [sys.executable, "-c", _HELPER]
        ranks, *words = subprocess.check_output(helper, text=True).splitlines()
        assert ranks == f"0 {world.size}"
        refusal = "A collective can only be called in the process of a rank"
        assert " ".join(words).startswith(refusal)
    assert keras_dist.gather(world.rank) == list(range(world.size))


def test_numbers_arrays_and_tensors_are_summed_and_averaged(world):
    """Each kind comes back as its own kind."""
    total = sum(range(world.size))
    assert keras_dist.sum(world.rank) == total
    assert keras_dist.average(world.rank) == pytest.approx(total / world.size)
    assert keras_dist.average({"a": [1.0 * world.rank]}) == {"a": [total / world.size]}
    array = np.arange(3) * world.rank
    assert keras_dist.sum(array).tolist() == (np.arange(3) * total).tolist()
    for dtype in ("float64", "float32", "float16", "bfloat16", "int32", "int64"):
        tensor = tf.cast([world.rank, 1], dtype)
        summed = keras_dist.sum(tensor)
        assert summed.dtype == tensor.dtype
        assert tf.cast(summed, "int64").numpy().tolist() == [total, world.size]
    assert keras_dist.average(tf.constant([True, False])).numpy().tolist() == [1, 0]


@pytest.mark.several_ranks
def test_no_sum_or_average_overflows_a_narrow_dtype(world):
    """`np.sum` gives int64, too; an average has the dtype of its floats."""
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        largest = np.array([np.iinfo(dtype).max], dtype)
        for value in (largest, largest[0], tf.constant(largest)):
            if tf.is_tensor(value) and "32" in dtype:
                continue
            summed = np.asarray(keras_dist.sum(value))
            assert summed.dtype == "int64" and summed == int(largest[0]) * world.size
    half = np.float16(40000.0)
    for value in (half, tf.constant(half), tf.constant(half, tf.bfloat16)):
        mean = keras_dist.average(value)
        assert mean.dtype == value.dtype and mean == value


def test_collectives_work_inside_a_graph(world):
    """Twice the same collective in one graph, traced more often on one rank."""

    @tf.function
    def both(x):
        return keras_dist.sum(x), keras_dist.average(x)

    if world.rank == 0:
        # A trace more on one rank must not change the names of the next one.
        both.get_concrete_function(tf.TensorSpec([7]))
    summed, averaged = both(tf.ones([2]))
    assert summed.numpy().tolist() == [world.size] * 2
    assert averaged.numpy().tolist() == [1.0, 1.0]


@pytest.mark.several_ranks
@pytest.mark.over_horovod
def test_a_tensor_that_nothing_else_needs_is_summed_in_place(world):
    """The sum of one that is needed, or of a variable, has memory of its own."""

    def address(tensor, *after):
        with tf.control_dependencies(after):
            return tf.numpy_function(lambda x: x.ctypes.data, [tensor], tf.int64)

    @tf.function
    def sums(x, kept):
        own, other = x * 2, x * 3
        before = address(own)
        with tf.control_dependencies([before]):
            summed, summed_other = keras_dist.sum(own), keras_dist.sum(other)
            of_variable = keras_dist.sum(kept.read_value())
        is_same = address(summed) == before
        return is_same, summed, summed_other, other + 0, of_variable

    kept, x = tf.Variable(tf.fill([1000], 5.0)), tf.fill([1000], 1.0 + world.rank)
    total = sum(range(1, world.size + 1))
    for _ in range(3):
        is_same, *found = sums(x, kept)
        expected = [2 * total, 3 * total, 3 * (1 + world.rank), 5 * world.size]
        assert [set(each.numpy()) for each in found] == [{each} for each in expected]
    assert is_same
    assert set(kept.numpy()) == {5} and set(x.numpy()) == {1 + world.rank}
    assert set(keras_dist.sum(x).numpy()) == {total}
    assert set(x.numpy()) == {1 + world.rank}
    assert set(keras_dist.sum(kept).numpy()) == {5 * world.size}
    assert set(kept.numpy()) == {5}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_every_number_of_a_large_tensor_is_summed(world, dtype):
    """Over MPI it is summed in pieces of 256 KiB a rank; a variable, too."""
    piece = world.size * 2**18 // np.dtype(dtype).itemsize
    total = sum(range(1, world.size + 1))
    for length in (piece - 1, piece, piece + 1, 3 * piece + 5):
        counted = np.arange(length, dtype=dtype)
        own = tf.constant(counted * (1 + world.rank))
        assert (keras_dist.sum(own).numpy() == counted * total).all()
        assert (keras_dist.sum(tf.Variable(own)).numpy() == counted * total).all()
        in_place = tf.function(lambda: keras_dist.sum(own * 2))  # noqa: B023
        assert (in_place().numpy() == counted * 2 * total).all()


def test_objects_are_broadcast_and_gathered(world):
    """Any object, of another size on each rank."""
    mine = {"rank": world.rank, "text": "é" * world.rank}
    assert keras_dist.gather(mine) == [
        {"rank": rank, "text": "é" * rank} for rank in range(world.size)
    ]
    last = world.size - 1
    assert keras_dist.broadcast(mine, last) == {"rank": last, "text": "é" * last}
    ragged = keras_dist.gather(tf.fill([world.rank], world.rank))
    assert [tensor.shape[0] for tensor in ragged] == list(range(world.size))
    tensor = tf.constant([world.rank, 5], tf.bfloat16)
    assert keras_dist.broadcast(tensor, last).numpy().tolist() == [last, 5]
    assert [float(each) for each in keras_dist.gather(tensor[1])] == [5.0] * world.size
    for dtype in ("bool", "uint8", "int16", "uint32", "int64", "float16", "float64"):
        tensor = tf.cast([world.rank, 5], dtype)
        sent = keras_dist.broadcast(tensor, last)
        expected = tf.cast([last, 5], dtype).numpy().tolist()
        assert sent.dtype == dtype and sent.numpy().tolist() == expected
    for dtype in ("complex64", "complex128"):
        tensor = tf.constant([world.rank + 0.5j, 1.5], dtype)
        assert keras_dist.broadcast(tensor, last).numpy().tolist() == [last + 0.5j, 1.5]
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        sent = keras_dist.broadcast(variable, 0)
    assert tape.gradient(sent, variable) is not None
    if world.size > 1:
        mixed = tf.constant([1.0]) if world.rank == 0 else tf.constant([1])
        with pytest.raises(tf.errors.OpError, match="data type"):
            keras_dist.broadcast(mixed, 0)


def test_variables_are_broadcast_alone_and_packed(world, monkeypatch):
    """A large one as it is, others packed; of every dtype that a model has."""
    monkeypatch.setattr("keras_dist.comm.collectives._PACKED", 30)
    monkeypatch.setattr("keras_dist.comm.collectives._MESSAGE", 24)
    kinds = (("float32", 9), ("float32", 2), ("int32", 3), ("bfloat16", 20))
    kinds += (("uint8", 40), ("int32", 4), ("int32", 8), ("float16", 4))
    variables = [
        keras.Variable(np.full(length, world.rank + index), dtype=dtype)
        for index, (dtype, length) in enumerate(kinds)
    ]
    variables.append(keras.Variable(world.rank + len(kinds), dtype="bfloat16"))
    empty = keras.Variable(np.zeros((0, 4)), dtype="float64")
    comm.broadcast_variables([*variables, empty], world.size - 1)
    for index, variable in enumerate(variables):
        values = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
        assert (values == world.size - 1 + index).all()


def test_values_that_cannot_be_summed_are_refused(world):
    """An error instead of a collective that other ranks would wait in."""
    raises_everywhere(TypeError, lambda: keras_dist.sum("text"), "'text'")
    too_large = f"Received: {world.size}"
    raises_everywhere(
        ValueError, lambda: keras_dist.broadcast(1, root_rank=world.size), too_large
    )


def test_an_error_on_one_rank_is_raised_on_all(world):
    """It says which and why, can be caught as most errors can, and is raised once."""
    last = world.size - 1
    with pytest.raises((KeyError, RankError)) as caught, comm.wait_for_all_ranks():
        if world.rank == last:
            raise KeyError("tea")
    assert is_known(caught.value)
    if world.rank == last:
        assert caught.value.args == ("tea",)
    else:
        assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
        assert (caught.value.rank, caught.value.cause) == (last, "KeyError: 'tea'")
        assert str(caught.value) == f"On rank {last}: KeyError: 'tea'"
    with comm.wait_for_all_ranks():
        pass


@pytest.mark.several_ranks
def test_facts_that_are_equal_cost_one_short_message_of_each_rank(world, monkeypatch):
    """However many there are."""
    calls = []
    plain = transport.run

    def counted(function, link, tensor, name):
        calls.append(int(tf.size(tensor)) * tensor.dtype.size)
        return plain(function, link, tensor, name)

    monkeypatch.setattr(transport, "run", counted)
    comm.agree({f"fact {n}": "x" * 100 for n in range(1000)}, advice="")
    assert len(calls) == 1 and calls[0] < 200


def test_ranks_agree_on_facts_or_an_error_names_the_value_of_each(world):
    """Facts with other messages are equal, too, as 1 and 1.0: values decide."""
    comm.agree({"one": 1 if world.rank else 1.0, "two": 2}, advice="")
    if world.size > 1:
        last = world.size - 1
        with pytest.raises(ValueError, match="disagree on color") as caught:
            comm.agree({"color": world.rank}, advice="Do something.")
        assert f"rank {last}: {last}" in str(caught.value)
        assert str(caught.value).endswith("Do something.")
        assert is_known(caught.value)  # none of them tells the others again


@pytest.mark.several_ranks
def test_a_rank_that_has_failed_meets_those_that_compare_facts(world):
    """It sends its error instead of a digest, which all then raise."""

    def meet():
        if world.rank == 0:
            with comm.wait_for_all_ranks():
                raise ZeroDivisionError("division by zero")
        comm.agree({"size": world.size}, advice="")

    kind = ZeroDivisionError if world.rank == 0 else RuntimeError
    with pytest.raises(kind, match="by zero"):
        meet()
