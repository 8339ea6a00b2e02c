"""Every rank runs every test here, in the same order; the oracle is plain Keras."""

import gc
import os
import resource
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from claims import distribute_jobs, models_in, train_on_one_process
from models import make_compiled, perceptron, vectors

import keras_dist
from keras_dist.data.pipeline import as_untuned


def pytest_configure(config):
    """Registers the marks of tests that need not run on every number of ranks."""
    config.addinivalue_line("markers", "several_ranks: one rank is plain Keras")
    config.addinivalue_line("markers", "three_ranks: an odd number may matter")
    config.addinivalue_line("markers", "slow_on_three: there, with LONG_TESTS=1 alone")
    config.addinivalue_line("markers", "two_ranks: slow, and the same on any number")
    config.addinivalue_line("markers", "over_horovod: its threads, memory and names")
    # The oracle, plain Keras, need not sleep at the end of each pass over its data.
    strategy = tf.distribute.get_strategy()
    strategy.experimental_distribute_dataset = lambda data, _=None: as_untuned(data)
    gc.freeze()  # the libraries, through which Python would go each time
    gc.set_threshold(20_000, 20, 50)


def pytest_collection_modifyitems(config, items):
    """Deselects tests that would compare Keras with itself, or repeat another one.

    A test runs on one number of ranks: on three where the number may matter, else on
    two, which are faster on two cores. One rank runs those where it may matter, too:
    the tests of one file, and with LONG_TESTS=1 all. That runs them on every number.
    """

    def is_left_out(item):
        marks = {mark.name for mark in item.iter_markers()}
        size, is_long = keras_dist.size(), "LONG_TESTS" in os.environ
        is_horovod = not keras_dist.comm.transport_name().startswith("TensorFlow")
        if "over_horovod" in marks and not is_horovod:
            return True
        if "two_ranks" in marks and size != 2:
            return True
        if size == 1:
            return "several_ranks" in marks or not (is_long or "three_ranks" in marks)
        is_quick = is_long or "slow_on_three" not in marks
        is_for_three = "three_ranks" in marks and is_quick
        if size == 2:
            return is_for_three and not (is_long or "two_ranks" in marks)
        return not is_for_three

    out = [item for item in items if is_left_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_sessionfinish(session, exitstatus):
    """Stores the exit code for the end."""
    session.config.exit_code = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends the process at once.

    pytest holds the errors that tests expect, and these hold iterators of TensorFlow,
    each of which may take a minute to be destroyed.
    """
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
        if item.path == request.path and hasattr(item, "callspec")
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
