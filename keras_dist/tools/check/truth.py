"""The fourth stage: does training on all ranks equal plain Keras on one process?"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.fit import dist_fit
from keras_dist.tools.check.checks import (
    Found,
    Reporting,
    failed,
    named,
    ok,
    own_host,
    untried,
)

_RATE, _EPOCHS, _SEED = 0.01, 2, 5

# A last batch that is not full, on any number of ranks.
_BATCHES, _MORE_ROWS = 3, 5

_TOLERANCE = 1e-5

# Below this, the largest number of a tensor is no scale.
_LEAST = 1e-3

# Rows of one rank in a batch of the small models.
BATCH = 8


@dataclass(frozen=True)
class Subject:
    """A model with its data, and how far ranks may be from one process.

    Args:
        make: Makes the model for a learning rate, compiled.
        rows: Makes so many rows of `x` and `y`.
        tolerance: Largest difference of a number, relative to the largest number of
            its tensor, as in `docs/equivalence.md`.
    """

    make: Callable[[float], Any]
    rows: Callable[[int], tuple[Any, Any]]
    tolerance: float = 1e-5


def pictures(count: int) -> tuple[Any, Any]:
    """Make rows of 8×8 pictures with one of three labels."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(count, 8, 8, 1)).astype("float32")
    return x, generator.integers(0, 3, size=count)


def words(count: int) -> tuple[Any, Any]:
    """Make rows of six words, some of them frequent, with a number."""
    generator = np.random.default_rng(2)
    x = np.minimum(generator.geometric(0.2, size=(count, 6)), 30).astype("int32")
    return x, (x[:, :1] > 3).astype("float32")


def vectors(count: int) -> tuple[Any, Any]:
    """Make rows of five numbers with a number."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(count, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def cnn(rate: float) -> Any:
    """Make a convolution with a synchronized BatchNormalization."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Activation("relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(layers, keras.optimizers.SGD(rate, momentum=0.9), loss)


def embedding(rate: float) -> Any:
    """Make an Embedding, whose gradient is sparse, with Adam."""
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(31, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    return _compiled(layers, keras.optimizers.Adam(rate, epsilon=1e-3))


def perceptron(rate: float, **arguments: Any) -> Any:
    """Make two dense layers.

    Args:
        rate: Learning rate.
        **arguments: Arguments of `compile`.
    """
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1, dtype="float32"),
    ]
    return _compiled(layers, keras.optimizers.SGD(rate), **arguments)


def half(rate: float) -> Any:
    """Make two dense layers in mixed precision."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return perceptron(rate)
    finally:
        keras.config.set_dtype_policy(before)


def with_dropout(rate: float) -> Any:
    """Make a model that draws random numbers, with an optimizer that has state."""
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    return _compiled(layers, keras.optimizers.Adam(rate))


# Measured in `docs/equivalence.md`: a few roundings of a number in float16, and
# statistics, which amplify rounding.
_HALF, _STATISTICS = 2.0**-8, 1e-4

SUBJECTS = {
    "CNN": Subject(cnn, pictures, _STATISTICS),
    "Embedding": Subject(embedding, words),
    "float16": Subject(half, vectors, _HALF),
    "XLA": Subject(lambda rate: perceptron(rate, jit_compile=True), vectors),
}


def _compiled(layers: Any, optimizer: Any, loss: Any = "mse", **arguments: Any) -> Any:
    model = keras.Sequential(layers)
    model.compile(optimizer, loss, **arguments)
    return model


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    comm.init()
    if comm.device().kind == "GPU":
        # TF32 rounds to ten bits, which no tolerance here expects.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    report = Reporting("truth", options.checks)
    report.check("gradient", gradient)
    for name, subject in SUBJECTS.items():
        report.check(name, trained, subject)


def gradient() -> Found:
    """Check that each rank computes the same gradient of the same weights and rows."""
    keras.utils.set_random_seed(_SEED)
    model = cnn(_RATE)
    x, y = pictures(4 * BATCH)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model.loss(y, model(x, training=True)))
    found = tape.gradient(loss, [each.value for each in model.trainable_variables])
    own = [each.numpy() for each in found]
    of_all = comm.gather(own)
    gaps = [_difference(each, of_all[0]) for each in of_all]
    if comm.size() == 1:
        return untried("one rank has nobody to compare with")
    wrong = [rank for rank, gap in enumerate(gaps) if not gap <= _TOLERANCE]
    if wrong:
        hosts = comm.gather(own_host())
        return failed(
            f"for the same weights and rows, {named(wrong, hosts)} and rank 0 have "
            f"gradients that differ by {max(gaps):.1e}",
            "One of these devices, or the code of that host, computes wrongly: compare "
            "the lines `versions`, `code` and `matmul`, and try each host by itself.",
            differences=gaps,
        )
    return ok(f"the same on all ranks, within {max(gaps):.1e}", differences=gaps)


def trained(subject: Subject) -> Found:
    """Check that all ranks train the model that one process trains."""
    rows = _BATCHES * BATCH * comm.size() + _MORE_ROWS
    x, y = subject.rows(rows)
    fits: dict[str, Any] = {"shuffle": False, "epochs": _EPOCHS, "verbose": 0}
    keras.utils.set_random_seed(_SEED)
    model = subject.make(_RATE)
    dist_fit(model, x, y, batch_size=BATCH, **fits)
    own = state_of(model)
    expected = None
    if comm.rank() == 0:
        keras.utils.set_random_seed(_SEED)
        oracle = subject.make(_RATE * comm.size())  # as `dist_fit` scales it
        oracle.fit(x, y, batch_size=BATCH * comm.size(), **fits)
        oracle.optimizer.learning_rate = _RATE  # `dist_fit` leaves it as it was
        expected = state_of(oracle)
    expected = comm.broadcast(expected)
    gaps = comm.gather(_difference(own, expected))
    digests = comm.gather(digest_of(own))
    return _verdict(gaps, digests, subject.tolerance)


def _verdict(gaps: Sequence[float], digests: Sequence[str], tolerance: float) -> Found:
    gap, hosts = max(gaps), comm.gather(own_host())
    data = {"difference": gap, "tolerance": tolerance}
    other = [rank for rank, text in enumerate(digests) if text != digests[0]]
    if other:
        return failed(
            f"{named(other, hosts)} and rank 0 hold different bits",
            "The ranks computed different updates from the same average: a fault of "
            "memory or device, or hosts with different processors. "
            'ReplicaCheck(action="resync") keeps them equal.',
            **data,
        )
    if not gap <= tolerance:
        return failed(
            f"differs from plain Keras on one process by {gap:.1e}; at most "
            f"{tolerance:.0e} is rounding",
            "Do not trust a training here. See the lines above that failed first; if "
            "there are none, report it with the file of `--json`.",
            **data,
        )
    several = "all ranks equal to the bit; " if len(digests) > 1 else ""
    return ok(
        f"{several}{gap:.1e} from plain Keras (at most {tolerance:.0e})",
        **data,
    )


def state_of(model: Any) -> list[Any]:
    """Return all weights and the optimizer's state, as arrays."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def digest_of(arrays: Sequence[Any]) -> str:
    """Hash the bits of all arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _difference(own: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest number of its array."""
    gaps = [0.0]
    for array, other in zip(own, expected, strict=True):
        scale = max(_LEAST, float(np.abs(other).max(initial=0.0)))
        gap = np.abs(array.astype("float64") - other.astype("float64"))
        gaps.append(float(gap.max(initial=0.0)) / scale)
    return float(np.max(gaps))  # a NaN is the largest
