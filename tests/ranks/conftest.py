"""Every rank runs every test here, in the same order; the oracle is plain Keras.

See `harness/rank_tests.py`.
"""

import gc
import os
import resource
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from harness import rank_tests
from harness.claims import distribute_jobs, models_in, train_on_one_process
from harness.models import make_compiled, perceptron, vectors

import keras_dist
from keras_dist.data.pipeline import as_untuned


def pytest_configure(config):
    """Prepare a rank, or the process that starts ranks."""
    rank_tests.register(config)
    if not rank_tests.is_rank():
        return
    # The oracle, plain Keras, need not sleep at the end of each pass over its data.
    strategy = tf.distribute.get_strategy()
    strategy.experimental_distribute_dataset = lambda data, _=None: as_untuned(data)
    gc.freeze()  # the libraries, through which Python would go each time
    gc.set_threshold(20_000, 20, 50)


def pytest_sessionfinish(session, exitstatus):
    """Stores the exit code for the end."""
    session.config.exit_code = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends a rank at once.

    pytest holds the errors that tests expect, and these hold iterators of TensorFlow,
    each of which may take a minute to be destroyed.
    """
    if rank_tests.is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(config, "exit_code", 1))


@pytest.fixture
def world():
    """The `World` of this process: rank and size."""
    return keras_dist.init()


@pytest.fixture(autouse=True)
def one_seed():
    """Every test starts from the same random state on every rank."""
    keras.utils.set_random_seed(7)


@pytest.fixture
def in_float64():
    """All models are of float64, in which rounding hides no error."""
    with models_in("float64"):
        yield


@pytest.fixture
def folder(tmp_path_factory):
    """One folder for all ranks."""
    return Path(keras_dist.broadcast(str(tmp_path_factory.mktemp("shared"))))


@pytest.fixture
def limit_files():
    """Lets no file grow beyond so many bytes, as on a full disk, or ends that."""
    before, largest = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=before):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, largest))

    yield limit
    limit()


@pytest.fixture
def rows():
    """101 rows of five numbers and a label, the same on every rank."""
    return vectors(101)


@pytest.fixture(scope="module")
def equals_one_process(request):
    """Compares a `Case` or a `Way` with one process; each rank trains some of these."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "case" in item.callspec.params
    ]
    oracles = distribute_jobs([case.oracle for case in chosen])
    expected = dict(zip((case.title for case in chosen), oracles, strict=True))

    def compare(case):
        difference, tolerance, where = case.compare(expected[case.title])
        assert difference <= tolerance, f"{where}: {difference:.1e} > {tolerance:.1e}"

    return compare


@pytest.fixture
def make_model():
    """Makes the same small model at every call, from the same initial weights.

    It runs eagerly unless a test sets `run_eagerly`: on three ranks of two cores,
    tracing takes longer than training.
    """

    def make(optimizer=None, *, seed=3, **compiled):
        optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
        how = {"metrics": ["accuracy"], "run_eagerly": True, "seed": seed} | compiled
        return make_compiled(perceptron, optimizer, "binary_crossentropy", **how)

    return make


@pytest.fixture
def fit_plainly(make_model):
    """Trains that model by plain Keras on the first rank, in the order of the rows."""

    def fit(optimizer, *data, rate=None, **arguments):
        def train():
            model = make_model(optimizer)
            history = model.fit(*data, shuffle=False, verbose=0, **arguments)
            if rate is not None:
                model.optimizer.learning_rate = rate
            return model, history

        return train_on_one_process(train)

    return fit
