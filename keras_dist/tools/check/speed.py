"""The last stage: rows per second on 1, 2, 4 … ranks, with synthetic data.

One launch measures all numbers of ranks, with a process set for each: ranks that do not
train wait. Each rank keeps its cores, or its GPU, at each number of ranks.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.fit import dist_fit
from keras_dist.tools.check.checks import Found, Reporting, ok, warning

# Steps that do not count, and that do: on a CPU, and on a GPU.
_WARM_UP, _STEPS, _STEPS_GPU = 2, 4, 30

# Less of the ideal speed than this is to be looked at.
_LOW = 0.5

VOCABULARY = 4096


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    counts = counts_of(comm.world_of_job().size)
    comm.init(process_sets=[range(count) for count in counts])
    has_gpu = comm.device().kind == "GPU"
    report = Reporting("speed", options.checks)
    pixels, batch = (224, 64) if has_gpu else (64, 8)
    report.check(
        "ResNet-50",
        measured,
        lambda: resnet(pixels=pixels),
        lambda rows: (
            np.zeros((rows, pixels, pixels, 3), "float32"),
            np.zeros(rows, "int32"),
        ),
        batch,
        f"{pixels}×{pixels} pixels, {batch} rows a rank",
    )
    length, width, layers = (256, 512, 6) if has_gpu else (64, 128, 2)
    report.check(
        "transformer",
        measured,
        lambda: transformer(length=length, width=width, layers=layers),
        lambda rows: (np.ones((rows, length), "int32"),) * 2,
        batch,
        f"{layers} layers of {width}, {length} words, vocabulary {VOCABULARY}, "
        f"{batch} rows a rank",
    )


def counts_of(size: int) -> list[int]:
    """Choose the numbers of ranks to measure.

    >>> counts_of(1), counts_of(3), counts_of(8)
    ([1], [1, 2, 3], [1, 2, 4, 8])
    """
    powers = [2**power for power in range(size.bit_length())]
    return list(dict.fromkeys([*powers, size]))


def measured(
    make: Callable[[], Any], rows: Callable[[int], Any], batch: int, what: str
) -> Found:
    """Measure how many rows a second 1, 2, 4 … ranks train."""
    rates = {}
    for count in counts_of(comm.size()):
        own = 0.0
        if comm.rank() < count:
            own = _rate(make(), rows, batch, count)
        rates[count] = min(filter(None, comm.gather(own)))
        keras.utils.clear_session(free_memory=True)
    efficiency = {count: rate / count / rates[1] for count, rate in rates.items()}
    texts = [
        f"{count}: {rate:,.3g} rows/s" + (f" ({efficiency[count]:.0%})" * (count > 1))
        for count, rate in rates.items()
    ]
    seen = f"ranks {', '.join(texts)}; {what}"
    data = {"rows_per_second": rates, "efficiency": efficiency}
    if min(efficiency.values()) < _LOW:
        return warning(
            seen,
            "More ranks help little here: see `bandwidth`, docs/levers.md, and "
            '`sync="every:8"` for a slow network. On a busy machine, measure again.',
            **data,
        )
    return ok(seen, **data)


class _Clock(keras.callbacks.Callback):
    """Record when each batch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self.ends.append(time.perf_counter())


def _rate(model: Any, rows: Callable[[int], Any], batch: int, count: int) -> float:
    """Measure rows per second of all ranks that train."""
    steps = _STEPS_GPU if comm.device().kind == "GPU" else _STEPS
    x, y = rows(batch * count * (_WARM_UP + steps))
    clock = _Clock()
    dist_fit(
        model,
        x,
        y,
        batch_size=batch,
        verbose=0,
        callbacks=[clock],
        process_set=list(range(count)),
    )
    seconds = clock.ends[-1] - clock.ends[_WARM_UP - 1]
    return batch * count * steps / seconds


def resnet(*, pixels: int) -> Any:
    """Make a ResNet-50 with random weights."""
    shape = (pixels, pixels, 3)
    model = keras.applications.ResNet50(weights=None, input_shape=shape)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy"
    )
    return model


def transformer(*, length: int, width: int, layers: int) -> Any:
    """Make an encoder that predicts a word for each word.

    Args:
        length: Words of a row.
        width: Numbers of a word.
        layers: Number of layers.
    """
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(4, width // 4)
        x = keras.layers.LayerNormalization()(x + attention(x, x))
        wide = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(wide))
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model
