"""A rank of `cycles.py`: small sums, an idle Horovod, normalization by all ranks."""

import statistics
import time

import keras
import numpy as np

import keras_dist

SUMS, IDLE_SECONDS, LAYERS, ROWS, BATCH = 200, 3.0, 8, 4096, 32


class Clock(keras.callbacks.Callback):
    """Milliseconds of a step, and of the processor in it, in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[tuple[float, float]] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Begin."""
        self.begin = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Count."""
        steps = ROWS / keras_dist.size() / BATCH
        now = time.perf_counter(), time.process_time()
        both = [1e3 * (b - a) / steps for a, b in zip(self.begin, now, strict=True)]
        self.epochs.append((both[0], both[1]))


def sum_of_one_number() -> float:
    """Milliseconds, the median."""
    times = []
    for number in range(SUMS):
        begin = time.perf_counter()
        keras_dist.sum(np.float32(number))
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def idle() -> float:
    """The share of a core, in percent, of a rank that waits for nothing."""
    begin = time.process_time()
    time.sleep(IDLE_SECONDS)
    return 100 * (time.process_time() - begin) / IDLE_SECONDS


def synchronized() -> tuple[float, float]:
    """A step of a model with many small collectives, and of the processor in it."""
    layers = keras.layers
    net = [keras.Input((8, 8, 3))]
    for _ in range(LAYERS):
        net += [layers.Conv2D(8, 3, padding="same")]
        net += [layers.BatchNormalization(synchronized=True), layers.ReLU()]
    model = keras.Sequential([*net, layers.Flatten(), layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x = random.random((ROWS, 8, 8, 3), dtype="float32")
    y, clock = random.integers(0, 10, ROWS), Clock()
    keras_dist.dist_fit(
        model, x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=[clock]
    )
    steps, processor = zip(*clock.epochs[1:], strict=True)
    return statistics.median(steps), statistics.median(processor)


def main() -> None:
    """Print what the first rank has measured."""
    keras_dist.init()
    found = (sum_of_one_number(), idle(), *synchronized())
    if keras_dist.rank() == 0:
        print("measured:", *found, flush=True)


main()
