"""An error on one rank is soon one on all, and the ranks are still in step."""

import time
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import gather_errors, shortened
from harness.models import make_compiled

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.three_ranks]

# Of the README: others raise within so many seconds.
SECONDS = 5


class LastBatch(keras.callbacks.Callback):
    """Remembers when the last batch ended, after which a rank fails."""

    def __init__(self):
        super().__init__()
        self.time = None

    def on_train_batch_end(self, batch, logs=None):
        self.time = time.monotonic()

    on_test_batch_end = on_train_batch_end


class Batches(keras.utils.PyDataset):
    """Batches, of which the one that the last rank reads in the fourth step fails."""

    def __init__(self, x, y, error=None):
        super().__init__()
        self.x, self.y, self.error = x, y, error

    def __len__(self):
        return len(self.x) // 4

    def __getitem__(self, index):
        size = keras_dist.size()
        if self.error is not None and index == 4 * size - 1:
            raise self.error
        rows = slice(4 * index, 4 * index + 4)
        return self.x[rows], self.y[rows]


def make(layers=None, **options):
    layers = layers or [keras.Input((3,)), keras.layers.Dense(3, "softmax")]
    loss = options.pop("loss", "sparse_categorical_crossentropy")
    return make_compiled(partial(keras.Sequential, layers), "sgd", loss, **options)


def make_rows():
    """Rows of 3 classes, for six steps."""
    size = keras_dist.size()
    x = np.random.default_rng(0).random((24 * size, 3))
    y = np.arange(len(x)) % 3
    return x, y


def compiled_step(callback):
    """TensorFlow's own error, in a graph with collectives, on a label out of range."""
    x, y = make_rows()
    y[16 * keras_dist.size() - 1] = 7
    options = {"batch_size": 4 * keras_dist.size(), "batch": "global"}
    model = make(jit_compile=False)
    keras_dist.dist_fit(
        model, x, y, shuffle=False, verbose=0, callbacks=[callback], **options
    )


def slices_in_a_graph(callback):
    """Two steps in one call, and slices of an `Embedding`, which are gathered."""
    x, y = make_rows()
    x = (x * 9).astype("int32")
    y[16 * keras_dist.size() - 1] = 7
    layers = [
        keras.Input((3,)),
        keras.layers.Embedding(2000, 8),
        keras.layers.Flatten(),
    ]
    layers.append(keras.layers.Dense(3, "softmax"))
    model = make(layers, steps_per_execution=2, jit_compile=False)
    options = {"batch_size": 4 * keras_dist.size(), "batch": "global"}
    keras_dist.dist_fit(
        model, x, y, shuffle=False, verbose=0, callbacks=[callback], **options
    )


class Fails(keras.Sequential):
    """Fails in the fourth step of the last rank, in or after the update."""

    error, is_late = None, False

    def train_step(self, data):
        last = keras_dist.rank() == keras_dist.size() - 1
        is_now = last and int(self.optimizer.iterations) == 3
        if is_now and not self.is_late:
            raise self.error or KeyError("tea")
        logs = super().train_step(data)
        if last and int(self.optimizer.iterations) == 4 and self.is_late:
            raise self.error or KeyError("tea")
        return logs

    def test_step(self, data):
        if keras_dist.rank() == keras_dist.size() - 1:
            raise self.error or KeyError("tea")
        return super().test_step(data)

    def predict_step(self, data):
        if keras_dist.rank() == keras_dist.size() - 1:
            raise self.error or KeyError("tea")
        return super().predict_step(data)


def eager_step(callback, *, is_late=False, error=None):
    """A train step of the user's raises before or after the gradients' exchange."""
    model = Fails([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.is_late, model.error = is_late, error
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    keras_dist.dist_fit(
        model, *make_rows(), batch_size=4, verbose=0, callbacks=[callback]
    )


def memory(callback):
    """As where one GPU has no memory left."""
    error = tf.errors.ResourceExhaustedError(None, None, "OOM: tea")
    eager_step(callback, error=error)


def sequence(callback):
    """A `PyDataset`, whose error TensorFlow wraps."""
    data = Batches(*make_rows(), error=KeyError("tea"))
    keras_dist.dist_fit(
        make(run_eagerly=True), data, shuffle=False, verbose=0, callbacks=[callback]
    )


def evaluation(callback):
    """A step of an evaluation."""
    model = Fails([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile(loss="sparse_categorical_crossentropy", run_eagerly=True)
    with keras_dist.distribute():
        model.evaluate(*make_rows(), batch_size=4, verbose=0)


def sequence_in_evaluation(callback):
    """A `PyDataset` that is evaluated."""
    data = Batches(*make_rows(), error=KeyError("tea"))
    with keras_dist.distribute():
        make(run_eagerly=True).evaluate(data, verbose=0)


def validation(callback):
    """A step of a validation."""
    model = Fails([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    x, y = make_rows()
    rows, tests = slice(0, 3 * 4 * keras_dist.size()), (x[:12], y[:12])
    keras_dist.dist_fit(model, x[rows], y[rows], 4, validation_data=tests, verbose=0)


def prediction(callback):
    """A step of a prediction, and a `PyDataset` that is predicted."""
    model = Fails([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    model.compile(run_eagerly=True)
    with keras_dist.distribute():
        model.predict(make_rows()[0], batch_size=4, verbose=0)


def callbacks_alone(callback):
    """Keras's own `fit`, with single callbacks of this package, as of Horovod."""
    model = Fails([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    given = [keras_dist.BroadcastVariables(), keras_dist.MetricAverage(), callback]
    model.fit(*make_rows(), batch_size=4, verbose=0, callbacks=given)


def late_step(callback):
    """A rank has its update, and fails before the step ends."""
    eager_step(callback, is_late=True)


LABEL, TEA = "label value of 7", "KeyError: 'tea'"
QUICK = [(compiled_step, LABEL), (slices_in_a_graph, LABEL), (memory, "OOM: tea")]
QUICK += [(sequence, TEA), (callbacks_alone, TEA)]
LONG = [eager_step, late_step, evaluation, sequence_in_evaluation, validation]
LONG.append(prediction)


@pytest.mark.parametrize(
    ("work", "cause"), shortened([*QUICK, *((work, TEA) for work in LONG)], QUICK)
)
def test_an_error_of_one_rank_is_raised_on_all_within_seconds(world, work, cause):
    """With its text; then the ranks train, and agree, as if nothing had been."""
    callback = LastBatch()
    errors = gather_errors(Exception, partial(work, callback))
    if callback.time is not None:
        assert time.monotonic() - callback.time < SECONDS
    *others, (own, text) = errors
    assert own != "RankError" and cause.rpartition(": ")[2] in text
    for kind, text in others:
        assert kind == "RankError" and text.startswith(f"On rank {world.size - 1}: ")
        assert cause in text
    trained = make(run_eagerly=True)
    keras_dist.dist_fit(trained, *make_rows(), verbose=0)
    assert len(set(keras_dist.gather(float(trained.get_weights()[0].sum())))) == 1


def enter_first_rank():
    with keras_dist.first_rank():
        pass


@pytest.mark.parametrize("is_fit", [True, False])
def test_other_calls_on_each_rank_are_an_error_that_names_both(world, is_fit):
    """None returns what another one has sent."""

    def call():
        if world.rank == 0:
            return keras_dist.gather({"accuracy": 0.9})
        if is_fit:
            return keras_dist.dist_fit(make(run_eagerly=True), *make_rows(), verbose=0)
        return enter_first_rank()

    errors = gather_errors(Exception, call)
    assert {kind for kind, _ in errors} == {"RuntimeError"}
    for _, text in errors:
        assert text.startswith("All ranks wait, in different collectives.")
        assert "rank 0 in `gather` at test_one_rank_fails.py, line" in text
        other = "fit" if is_fit else "first_rank"
        assert f"rank 1 in `{other}` at test_one_rank_fails.py, line" in text
    assert keras_dist.gather(1) == [1] * world.size
