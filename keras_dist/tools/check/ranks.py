"""The program of the ranks: their devices, their sums, and a small training.

All ranks try the checks in this order, and the first rank of each host reports them.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.callbacks.broadcast_variables import state_variables
from keras_dist.fit import dist_fit
from keras_dist.launch.hosts import addresses, num_gpus
from keras_dist.tools.check.host import (
    Result,
    Status,
    by_value,
    installed_versions,
    name_ranks,
)

# Sizes of a sum, and how often one is measured.
SIZES = {"4 B": 4, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "100 MB": 10**8}
_REPEATS = 10

# Rows of one rank in a batch, and the learning rate of the small training.
_BATCH, _RATE = 8, 0.01

# Largest difference to one process, relative to the largest number of a variable:
# statistics of a batch amplify rounding, as `docs/equivalence.md` shows.
_TOLERANCE = 1e-4

Facts = Mapping[str, Any]


def check_ranks() -> Iterator[Result]:
    """Check the ranks, and yield each result."""
    begin = time.perf_counter()
    comm.init()
    seconds = time.perf_counter() - begin
    facts = comm.gather(rank_facts())
    hosts = [each["host"] for each in facts]
    seen = f"{len(facts)} ranks over {comm.transport_name()} in {seconds:.1f} s; "
    seen += by_value([each["network"] for each in facts], hosts)
    yield Result("connect", "ok", seen)
    yield check_alike([each["versions"] for each in facts], hosts)
    yield check_devices(facts, hosts)
    yield check_sums(hosts)
    yield check_training()


def rank_facts() -> dict[str, Any]:
    """Describe this rank: its host, its versions, its device."""
    device = comm.device()
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    name = str(device)
    if device.kind == "GPU":
        (gpu,) = tf.config.get_visible_devices("GPU")
        model = tf.config.experimental.get_device_details(gpu).get("device_name", "")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # As all processes of the host call it.
        number = visible.split(",")[device.index] if visible else device.index
        name = f"GPU {number} {model}"
    return {
        "host": os.environ.get("HOROVOD_HOSTNAME", "localhost"),
        "network": f"{interface} {addresses().get(interface, '')}".strip(),
        "versions": ", ".join(map(" ".join, installed_versions().items())),
        "has_gpu": device.kind == "GPU",
        "device": name,
        "num_gpus": num_gpus(),
        "cores": sorted(os.sched_getaffinity(0)),
    }


def check_alike(versions: Sequence[str], hosts: Sequence[str]) -> Result:
    """Check that all ranks have the same versions."""
    if len(set(versions)) == 1:
        return Result("alike", "ok", "all ranks have the same versions")
    cure = (
        "Install the same versions on all hosts, and run keras-dist install-horovod "
        "after that: Horovod is built for one TensorFlow."
    )
    return Result("alike", "failed", by_value(versions, hosts), cure)


def check_devices(facts: Sequence[Facts], hosts: Sequence[str]) -> Result:
    """Check that each rank has a GPU that no other rank has, or cores of its own."""
    devices = [each["device"] for each in facts]
    gpus = [(each["host"], each["device"]) for each in facts if each["has_gpu"]]
    without = [r for r, each in enumerate(facts) if not each["has_gpu"]]
    blind = [r for r in without if facts[r]["num_gpus"]]
    cores = [(each["host"], core) for each in facts for core in each["cores"]]
    status: Status = "ok"
    seen, cure = by_value(devices, hosts), ""
    if len(gpus) > len(set(gpus)):
        status, seen = "failed", f"several ranks have one GPU: {seen}"
        cure = "Start fewer ranks, or name other GPUs in CUDA_VISIBLE_DEVICES."
    elif blind:
        status, count = "failed", facts[blind[0]]["num_gpus"]
        seen = f"TensorFlow sees none of {count} GPUs on {name_ranks(blind, hosts)}"
        cure = "pip install 'tensorflow[and-cuda]'; is the driver new enough for it?"
    elif 0 < len(without) < len(facts):
        status, seen = "failed", f"{seen}: some ranks have no GPU"
        cure = "Leave out hosts without GPUs, or hide all: CUDA_VISIBLE_DEVICES=-1"
    elif without and len(cores) > len(set(cores)):
        status, seen = "warning", f"{seen}; ranks use the same cores"
        cure = "Start fewer ranks, or unset KERAS_DIST_BIND and the numbers of threads."
    return Result("devices", status, seen, cure)


def check_sums(hosts: Sequence[str]) -> Result:
    """Check that sums of tensors over the ranks are right, and how fast they are."""
    if comm.size() == 1:
        return Result("sums", "ok", "one rank sends nothing")
    texts = []
    for size, num_bytes in SIZES.items():
        # Small whole numbers, whose sums are exact in every order.
        numbers = tf.constant(np.resize(np.arange(7, dtype="float32"), num_bytes // 4))
        expected = numbers * (comm.size() * (comm.size() + 1) // 2)
        total = comm.total(numbers * (comm.rank() + 1.0), purpose="check")
        is_right = comm.gather(bool(tf.reduce_all(total == expected)))
        if not all(is_right):
            wrong = [rank for rank, right in enumerate(is_right) if not right]
            cure = "Try `-np 2` on each host, and the other KERAS_DIST_TRANSPORT."
            seen = f"a sum of {size} is wrong on {name_ranks(wrong, hosts)}"
            return Result("sums", "failed", seen, cure)
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            comm.total(numbers, purpose="check")
            times.append(time.perf_counter() - begin)
        seconds = max(comm.gather(statistics.median(times)))
        # With any algorithm each rank sends as much (Patarasuk and Yuan, 2009).
        rate = 2 * (comm.size() - 1) / comm.size() * num_bytes / seconds
        texts.append(f"{size} {seconds * 1e3:.3g} ms ({rate / 1e9:.2g} GB/s)")
    return Result("sums", "ok", ", ".join(texts))


def check_training() -> Result:
    """Check that all ranks train the model that plain Keras trains on one process."""
    # TF32 rounds to ten bits, which the tolerance does not expect.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # Rows of six words, some of them frequent; the last batch is not full.
    shape = 3 * _BATCH * comm.size() + 5, 6
    x = np.random.default_rng(2).geometric(0.2, shape)
    x = np.minimum(x, 30).astype("int32")
    y = (x[:, :1] > 3).astype("float32")
    fit: dict[str, Any] = {"shuffle": False, "epochs": 2, "verbose": 0}
    model = _make_model(_RATE)
    dist_fit(model, x, y, batch_size=_BATCH, **fit)
    trained, expected = list(map(comm.to_array, state_variables(model))), None
    if comm.rank() == 0:
        single = _make_model(_RATE * comm.size())  # as `dist_fit` scales the rate
        single.fit(x, y, batch_size=_BATCH * comm.size(), **fit)
        single.optimizer.learning_rate = _RATE  # which `dist_fit` leaves as it was
        expected = list(map(comm.to_array, state_variables(single)))
    # Relative to the largest number of each array. A NaN is the largest.
    pairs = zip(trained, comm.broadcast(expected), strict=True)
    gaps = [np.max(abs(a - b)) / max(1e-3, np.max(abs(b))) for a, b in pairs]
    gap = np.max(comm.gather(float(np.max(gaps))))
    seen = f"{gap:.1e} from plain Keras on one process (at most {_TOLERANCE:.0e})"
    if gap <= _TOLERANCE:
        return Result("training", "ok", seen)
    cure = (
        "Do not trust a training here. Try each host by itself: a device may compute "
        "wrongly. If none does, report it with the file of `--json`."
    )
    return Result("training", "failed", seen, cure)


def _make_model(rate: float) -> Any:
    """Make a model with an Embedding, a convolution and synchronized statistics."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(31, 8),
            keras.layers.Conv1D(8, 3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Activation("relu"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(rate, epsilon=1e-3), "mse")
    return model


if __name__ == "__main__":
    for result in check_ranks():
        if comm.local_rank() == 0:
            print(result.line(), flush=True)
