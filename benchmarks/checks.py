"""The time that `ReplicaCheck`, `NanReport` and a breakdown add to a step.

    horovodrun --gloo -np 2 python benchmarks/checks.py

Two models are trained alternately without and with a `NanReport`, and the smallest CPU
seconds of a step are compared: CPU time does not count other programs of a busy
machine, but it counts Horovod's polling while it waits. A check of all replicas is
timed alone, including its collective, and divided by 100 steps. The time that
`Throughput(breakdown=True)` adds does not depend on the model, and is measured on one
that computes next to nothing.
"""

import statistics
import time

import keras
from one_rank import compiled, seconds_of_step, small_cnn

import keras_dist

PAIRS = 2


class Checked(keras.callbacks.Callback):
    """Times some checks at the end of training."""

    def on_train_end(self, logs=None):
        check = keras_dist.ReplicaCheck()
        check.set_model(self.model)
        check.check()
        self.seconds, self.processor = [], []
        for _ in range(20):
            begin = time.perf_counter(), time.process_time()
            check.check()
            self.seconds.append(time.perf_counter() - begin[0])
            self.processor.append(time.process_time() - begin[1])


def fit_with(*more):
    """`dist_fit` with more callbacks."""

    def fit(model, x, y, callbacks, **arguments):
        return keras_dist.dist_fit(
            model, x, y, callbacks=[*callbacks, *more], **arguments
        )

    return fit


def models():
    """A small convolutional network, and layers that are all weights."""
    dense = compiled(
        keras.Input((784,)),
        keras.layers.Dense(2048, activation="relu"),
        keras.layers.Dense(1024, activation="relu"),
    )
    yield "small CNN", small_cnn(), (28, 28, 1), 64
    yield "two wide Dense layers", dense, (784,), 32


def main():
    """Prints a line for each model, on the first rank."""
    keras_dist.init()
    added_seconds = added_by_breakdown()
    for name, model, shape, batch_size in models():
        model.optimizer = keras.optimizers.Adam(1e-4)
        sizes = {"batch_size": batch_size, "steps": 20 * keras_dist.size()}
        plain, guarded = [], []
        for pair in range(PAIRS):
            order = [(plain, fit_with()), (guarded, fit_with(keras_dist.NanReport()))]
            for seconds, fit in order if pair % 2 else reversed(order):
                seconds.append(seconds_of_step(fit, model, shape, **sizes))
        checked = Checked()
        keras_dist.dist_fit(
            model, *rows(shape), batch_size=8, verbose=0, callbacks=[checked]
        )
        step = statistics.median(plain) * keras_dist.size()
        added = statistics.median(guarded) * keras_dist.size() - step
        both = (statistics.median(t) for t in (checked.seconds, checked.processor))
        checks = ", ".join(f"{t * 1e3:.2f} ms = {t / 100 / step:.3%}" for t in both)
        if keras_dist.rank() == 0:
            print(
                f"{name}: {model.count_params():,} weights; {step * 1e3:.1f} ms of the "
                f"processor a step (from {min(plain) / max(plain):.2f}); NanReport "
                f"{added * 1e3:+.2f} ms = {added / step:+.1%}; a check {checks} of 100 "
                "steps, by the clock and by the processor; the breakdown "
                f"{added_seconds * 1e6:+.0f} µs = {added_seconds / step:+.2%}",
                flush=True,
            )


def added_by_breakdown():
    """CPU seconds that a breakdown adds to a step; the median of some pairs."""
    plain, timed = (compiled(keras.Input((2,))) for _ in range(2))
    sizes = {"batch_size": 1, "steps": 400 * keras_dist.size()}
    added = []
    for pair in range(5):
        seconds = {}
        for is_timed in (False, True) if pair % 2 else (True, False):
            more = [keras_dist.Throughput(breakdown=True)] if is_timed else []
            model = timed if is_timed else plain
            took = seconds_of_step(fit_with(*more), model, (2,), **sizes)
            seconds[is_timed] = took * keras_dist.size()
        added.append(seconds[True] - seconds[False])
    return statistics.median(added)


def rows(shape):
    """Sixteen rows for each rank."""
    count = 16 * keras_dist.size()
    return keras.ops.zeros((count, *shape)), keras.ops.zeros((count,))


if __name__ == "__main__":
    main()
