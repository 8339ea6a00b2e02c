"""Ranks of one host that read each other's memory to sum over Gloo, or may not."""

import os
import sys

import pytest
from launch import launch

# Sums around the smallest size that is summed so, of all ranks and of some.
SCRIPT = """
import numpy as np
import tensorflow as tf
import keras_dist.horovod as hvd
of_two = hvd.ProcessSet([0, hvd_last]) if (hvd_last := {ranks} - 1) > 1 else None
hvd.init(process_sets=[of_two] if of_two else [])
everyone = [(None, range(hvd.size()))] + ([(of_two, of_two.ranks)] if of_two else [])
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


def summed(ranks, *before, **variables):
    """Run the script on so many ranks over Gloo; how often ranks agreed to read."""
    start = [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]
    script = [sys.executable, "-c", SCRIPT.format(ranks=ranks)]
    done = launch(
        [*start, *before, *script],
        ranks=None,
        timeout=180,
        env={"HOROVOD_LOG_LEVEL": "debug", **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all sums are right") == ranks
    return (done.stdout + done.stderr).count(READS)


def test_ranks_of_one_host_read_each_others_memory():
    """All ranks, and those of a process set, find out for themselves."""
    assert summed(3) == 3 + 2


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its kernel")
def test_no_rank_reads_memory_if_one_of_them_may_not():
    """All ranks agree, and sum through sockets."""
    assert summed(2, sys.executable, "-c", FORBIDDEN) == 0


@pytest.mark.long
def test_the_user_may_forbid_it():
    """By a variable."""
    assert summed(2, KERAS_DIST_READ_MEMORY="0") == 0
