"""Comparisons and helpers for tests on several ranks."""

import contextlib
import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist import comm
from keras_dist.optimizer.nested import optimizers_of
from keras_dist.version import parse_version

KERAS = parse_version(keras.__version__)

# Largest difference in float64. Up to Keras 3.12 the mean of a loss with a mask divides
# by the number of its entries plus 1e-7, which counts more in a smaller batch.
EXACT = 1e-10 if KERAS >= (3, 13) else 1e-7


def shortened(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Values of a parameter, all but the `quick` ones with LONG_TESTS=1 alone.

    A tuple is a value for each of several parameters.
    """
    return [
        value
        if value in quick
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long
        )
        for value in values
    ]


class Ended(BaseException):
    """Ends a fit at once, as a signal does; nothing of the package catches it."""


def slow_on_three(test: Any) -> Any:
    """Mark a test that runs on two ranks, and with LONG_TESTS=1 on three, too."""
    return pytest.mark.three_ranks(pytest.mark.slow_on_three(test))


@contextlib.contextmanager
def warned(words: str = "") -> Iterator[list[str]]:
    """Context manager that collects the texts of warnings with some words."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if words in str(w.message)]


@contextlib.contextmanager
def models_in(dtype: str) -> Iterator[None]:
    """Context manager in which models and their data are of this dtype."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@dataclass(frozen=True)
class OneProcess:
    """What plain Keras has trained on one process, known to all ranks.

    Args:
        state: Weights of the model, and the state of all optimizers, as arrays.
        history: The logs.
    """

    state: list[Any]
    history: dict[str, Any]


def train_on_one_process(train):
    """Train on the first rank alone; the others need no core.

    Args:
        train: A function that returns a model, and its `History` or the logs.
    """

    def job():
        model, history = train()
        logs = getattr(history, "history", history)
        return OneProcess(state_of(model), logs)

    return distribute_jobs([job])[0]


def assert_equals_one_process(
    make,
    data,
    batch_size=8,
    *,
    fit=keras_dist.dist_fit,
    batch="rank",
    factor=1,
    plain_make=None,
    plain_data=None,
    tolerance=1e-5,
    logs=True,
    options=(),
    **arguments,
):
    """Train on all ranks, and by plain Keras on the first alone: the same comes out.

    Args:
        make: Makes a compiled model, the same one at each call.
        data: Arrays; or a function that makes data in batches of so many rows, or a
            dict of that and of other arguments.
        batch_size: Rows of a batch of `dist_fit`.
        fit: Trains on all ranks; all but `dist_fit` has no options that are not given.
        batch: As of `dist_fit`. With "rank" plain Keras has the batches of all ranks.
        factor: On the rate of plain Keras while it trains.
        plain_make: Makes what plain Keras trains, if that is something else.
        plain_data: What plain Keras is given, if that is something else.
        tolerance: Of weights, the optimizer's state, and logs.
        logs: Names of the logs to compare; `True` for all.
        options: Of `dist_fit` alone.
        **arguments: Of both.

    Returns:
        The model of all ranks, its logs, and the `OneProcess`.
    """
    arguments = {"shuffle": False, "verbose": 0} | arguments

    def train(fit, make, data, rows, **more):
        model, given = make(), data
        if not callable(data):
            more["batch_size"] = rows
        elif isinstance(made := data(rows), dict):
            given, more = (), more | made
        else:
            given = (made,)
        return model, fit(model, *given, **arguments, **more)

    def fit_plainly(model, *data, **arguments):
        if factor != 1:
            rate = float(model.optimizer.learning_rate)
            model.optimizer.learning_rate = factor * rate
        history = model.fit(*data, **arguments)  # also a `fit` of the model's own
        if factor != 1:
            model.optimizer.learning_rate = rate
        return history

    plain = data if plain_data is None else plain_data
    total = batch_size * (keras_dist.size() if batch == "rank" else 1)
    oracle = train_on_one_process(
        lambda: train(fit_plainly, plain_make or make, plain, total)
    )
    if fit is keras_dist.dist_fit:
        options = {"batch": batch, "lr_scaling": "none"} | dict(options)
    model, history = train(fit, make, data, batch_size, **dict(options))
    assert largest_difference(model, oracle) <= tolerance
    assert_equal_to_the_bit(model)
    found = history.history
    for name in oracle.history if logs is True else logs:
        values = (keras.tree.flatten(each[name]) for each in (found, oracle.history))
        arrays = (np.concatenate([np.ravel(part) for part in each]) for each in values)
        np.testing.assert_allclose(*arrays, tolerance, tolerance, err_msg=name)
    return model, found, oracle


def assert_close(arrays, expected, tolerance=1e-5):
    """Lists of arrays are equal, but for rounding."""
    for own, other in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance / 10)


def assert_same_bits(arrays, expected):
    """Lists of arrays are equal, without any rounding."""
    for own, other in zip(arrays, expected, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        assert np.array_equal(own, other), (own, other)  # NaN is not NaN


def state_of(model):
    """All weights, and the state of all optimizers, as arrays."""
    if isinstance(model, OneProcess):
        return model.state
    optimizers = optimizers_of(model)
    compiled = getattr(model, "optimizer", None)
    assert compiled is None or any(each is compiled for each in optimizers)
    variables = [*model.weights, *(v for each in optimizers for v in each.variables)]
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def largest_difference(model, oracle):
    """Largest difference between two models' states, relative to the largest value."""
    return difference_of_states(state_of(model), state_of(oracle))


def difference_of_states(states, expected_states):
    """The same of two lists of arrays."""
    differences = [0.0]
    for own, expected in zip(states, expected_states, strict=True):
        assert own.shape == expected.shape
        scale = max(1e-3, float(np.abs(expected).max(initial=0.0)))
        gap = np.abs(own.astype("float64") - expected.astype("float64"))
        differences.append(float(gap.max(initial=0.0)) / scale)
    return float(np.max(differences))  # which is NaN if one of them is


def read_by_keras(count, seed, *, shuffle=True, batch_size=32, epochs=1):
    """The batches of row numbers that `Model.fit` reads from arrays, with this seed."""
    read = []

    class Reader(keras.Model):
        def train_step(self, data):
            read.append(keras.utils.unpack_x_y_sample_weight(data)[0].numpy())
            return {"loss": 0.0}

    keras.utils.set_random_seed(seed)
    model = Reader()
    model.compile(run_eagerly=True)
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": shuffle}
    model.fit(np.arange(count), verbose=0, **options)
    return read


def distribute_jobs(jobs):
    """Run each of `jobs` on one rank; returns the results of all, on every rank.

    An error of a job is raised on all ranks.
    """
    rank, size = keras_dist.rank(), keras_dist.size()
    numbers = range(rank, len(jobs), size)
    done, results = {}, {}
    with comm.wait_for_all_ranks():
        results = {i: jobs[i]() for i in numbers}
    for part in comm.gather(results):
        done |= part
    return [done[index] for index in range(len(jobs))]


def assert_equal_to_the_bit(model):
    """Every rank holds the same bits in the weights and the optimizer's state."""
    digest = hashlib.sha256()
    for array in state_of(model):
        digest.update(array.tobytes())
    assert len(set(keras_dist.gather(digest.hexdigest()))) == 1


def gather_errors(kind, call):
    """Call on every rank; returns class and text of each error, or `None`."""
    found = None
    try:
        call()
    except kind as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        found = type(error).__name__, text
    return keras_dist.gather(found)


def raises_everywhere(kind, call, *texts):
    """Call on every rank; each must raise `kind`, with all `texts` in its message.

    Returns the messages of all ranks.
    """
    errors = gather_errors(kind, call)
    assert None not in errors, f"not every rank raised: {errors}"
    messages = [message for _, message in errors]
    for message in messages:
        for text in texts:
            assert text in message, (text, message)
    return messages
