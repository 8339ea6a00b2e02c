"""Sums over Gloo by reading each other's memory, or not; process sets; the end."""

import os
import sys

import pytest
from harness.launching import launch

# Sums around the smallest size that is summed so, of all ranks and of some.
SCRIPT = """
import sys
import keras
import numpy as np
import tensorflow as tf
import keras_dist.horovod as hvd
both, one = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
has_sets = {ranks} == 3
hvd.init(process_sets=[both, one] if has_sets else [])
everyone = [(None, range(hvd.size()))] + ([(both, both.ranks)] if has_sets else [])
for dtype in ("float32", "float64", "int64", "float16"):
    smallest = 2**20 // np.dtype(dtype).itemsize
    for length in (smallest - 1, smallest, smallest + 1, 5 * smallest + 7):
        values = np.arange(length) % 100
        own = tf.constant(values * (1 + hvd.rank()), dtype)
        for group, members in everyone:
            if hvd.rank() in members:
                of_group = {{"process_set": group}} if group else {{}}
                total = sum(1 + member for member in members)
                for _ in range(3):
                    summed = hvd.allreduce(own, op=hvd.Sum, **of_group)
                    assert (summed.numpy() == values * total).all(), (dtype, length)
                assert (own.numpy() == values * (1 + hvd.rank())).all()
        largest = hvd.allreduce(own, op=hvd.Max)
        assert (largest.numpy() == values * hvd.size()).all()
print("all sums are right", flush=True)
"""

# On three ranks, after the sums.
SETS = """
rank = hvd.rank()
own = one if rank == 1 else both
assert own.included() and own.size() == len(own.ranks) and hvd.size() == 3
assert own.rank() == own.ranks.index(rank)
mean = hvd.allreduce(float(rank), process_set=own)
assert float(mean) == sum(own.ranks) / len(own.ranks)
assert int(hvd.broadcast(rank, own.ranks[-1], process_set=own)) == own.ranks[-1]
assert hvd.broadcast_object({"r": rank}, own.ranks[0], process_set=own) == {
    "r": own.ranks[0]
}
assert hvd.allgather_object(rank, process_set=own) == own.ranks
variables = [keras.Variable(float(rank)), tf.Variable(rank)]
hvd.broadcast_variables(variables, own.ranks[-1], process_set=own)
assert [float(variable) for variable in variables] == [own.ranks[-1]] * 2
variables[0].assign(10.0 + rank)
hvd.broadcast_variables(variables[:1], 2)
assert float(variables[0]) == 12
added = hvd.add_process_set([0, 1])
assert added.process_set_id and added.included() == (rank < 2)
if added.included():
    assert hvd.allgather([rank], process_set=added).numpy().tolist() == [0, 1]
assert hvd.remove_process_set(added) and added.size() is None
hvd.start_timeline(sys.argv[1], mark_cycles=True)
assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 3
hvd.stop_timeline()
assert hvd.is_initialized()
hvd.shutdown()
assert not hvd.is_initialized()
try:
    hvd.init()
    raise AssertionError("init is no error")
except RuntimeError as error:
    assert "was shut down" in str(error)
"""

# The second rank runs where the kernel refuses one call, as in some containers.
FORBIDDEN = """
import ctypes, os, struct, sys
load, equal, answer = (0x20, 0, 0, 0), (0x15, 0, 1, 310), (6, 0, 0)
lines = [load, equal, (*answer, 0x50001), (*answer, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in lines))
start = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
libc = ctypes.CDLL(None)
if os.environ["HOROVOD_RANK"] == "1":
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(start)) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""

READS = "keras_dist: ranks read each other's memory"


def summed(ranks, *before, more="", words=(), **variables):
    """Run the script on so many ranks over Gloo; how often ranks agreed to read."""
    script = [sys.executable, "-c", SCRIPT.format(ranks=ranks) + more, *words]
    env = {"HOROVOD_LOG_LEVEL": "debug", **variables}
    done = launch([*before, *script], ranks=ranks, timeout=180, env=env, check=True)
    assert done.stdout.count("all sums are right") == ranks
    return (done.stdout + done.stderr).count(READS)


def test_ranks_of_one_host_read_each_others_memory(tmp_path):
    """All ranks, and a process set's, find out for themselves.

    Sets may be registered by `init` or added; a second `init` is an error.
    """
    timeline = tmp_path / "timeline.json"
    given = {"more": SETS, "words": [str(timeline)], "HOROVOD_TIMELINE": "DYNAMIC"}
    assert summed(3, **given) == 3 + 2
    assert "ALLREDUCE" in timeline.read_text()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its kernel")
def test_no_rank_reads_memory_if_one_of_them_may_not():
    """All ranks agree, and sum through sockets."""
    assert summed(2, sys.executable, "-c", FORBIDDEN) == 0


@pytest.mark.long
def test_the_user_may_forbid_it():
    """By a variable."""
    assert summed(2, KERAS_DIST_READ_MEMORY="0") == 0
