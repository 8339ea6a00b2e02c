"""Let the C library keep the memory that a step frees, for the next step."""

import ctypes
import functools
import os
import re

import tensorflow as tf

from keras_dist.data.pipeline import as_untuned

# Parameters of glibc's `mallopt`, with the variables by which a user sets them, and our
# values in bytes. 32 MiB is the largest threshold that glibc takes.
_PARAMETERS = (
    (-3, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", 32 * 2**20),
    (-1, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", 512 * 2**20),
)


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse the memory of large tensors. Only the first call works.

    By default glibc learns from what is freed which blocks it keeps. The first data set
    of a Python generator that TensorFlow 2.21 reads in a process ends that: from then
    on, each block of more than 128 KiB is mapped when it is taken and unmapped when it
    is freed (`ApplyPython311MemoryPatch` in TensorFlow's `GeneratorDatasetOp`). Every
    step then faults on each page of its tensors, which halved the speed of small
    networks. So such a data set is read here, before other values are set.

    What the user's environment variables of malloc set is used instead. Nothing happens
    where the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    with tf.init_scope():
        empty = tf.data.Dataset.from_generator(
            tuple, output_signature=tf.TensorSpec([])
        )
        list(as_untuned(empty))
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for parameter, variable, tunable, value in _PARAMETERS:
        given = re.search(rf"{re.escape(tunable)}=(\w+)", tunables)
        text = os.environ.get(variable) or (given[1] if given else str(value))
        libc.mallopt(parameter, int(text, 0))
