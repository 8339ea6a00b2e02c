"""`distribute`: Keras's own methods use all ranks, and nobody changes a line."""

import contextlib
import inspect
import itertools
import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    Ended,
    assert_close,
    distribute_jobs,
    shortened,
    slow_on_three,
    warned,
)
from harness.models import make_compiled, perceptron

import keras_dist
from keras_dist import distribution, fit

several = pytest.mark.several_ranks


class Approximator(keras.Model):
    """A class whose `fit` and `evaluate` take other arguments (bayesflow, adapt)."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, *, dataset=None, **kwargs):
        if dataset is None:
            raise ValueError("Received no data to fit on.")
        known = inspect.signature(super().fit).parameters
        passed = {name: value for name, value in kwargs.items() if name in known}
        return super().fit(x=dataset[0], y=dataset[1], **passed)

    def evaluate(self, dataset, **kwargs):
        return super().evaluate(*dataset, **kwargs)


class PassesOn(Approximator):
    """Overrides that take what Keras's take."""

    def fit(self, *args, **kwargs):
        return keras.Model.fit(self, *args, **kwargs)

    def evaluate(self, x=None, y=None, **kwargs):
        return keras.Model.evaluate(self, x, y, **kwargs)

    def predict(self, x, **kwargs):
        return keras.Model.predict(self, x, **kwargs)


@slow_on_three
@pytest.mark.parametrize(
    ("kind", "is_inside"), [(Approximator, False), (PassesOn, True)]
)
def test_dist_fit_calls_no_override_with_other_arguments(rows, kind, is_inside):
    """Inside of `distribute` too, where an override ends in Keras's method again."""
    weights = []
    for is_plain in (True, False):
        model = make_compiled(kind, "sgd", "mse", run_eagerly=True)
        if is_plain:
            keras.Model.fit(model, *rows, verbose=0)
            weights.append([*model.get_weights(), keras.Model.predict(model, rows[0])])
            continue
        distributed = keras_dist.DistributedModel(model, batch="global")
        with keras_dist.distribute() if is_inside else contextlib.nullcontext():
            distributed.fit(*rows, verbose=0)
            distributed.evaluate(*rows, verbose=0)
            weights.append([*model.get_weights(), distributed.predict(rows[0])])
    assert_close(*weights)


class Evaluates(keras.callbacks.Callback):
    """Evaluates, predicts, and fits a copy, at the end of each epoch."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.found = rows, []

    def on_epoch_end(self, epoch, logs=None):
        copy = keras.models.clone_model(self.model)
        copy.set_weights(self.model.get_weights())
        copy.compile("sgd", "mse", run_eagerly=True)
        copy.fit(*self.rows, batch_size=16, verbose=0)
        found = self.model.evaluate(*self.rows, verbose=0)
        predicted = self.model.predict(self.rows[0], verbose=0)
        self.found.append([*found, predicted.sum(), copy.get_weights()[0].sum()])


def calls(make_model, rows):
    """Fit, evaluate and predict; positional arguments, too."""
    model = make_model(run_eagerly=False)
    history = model.fit(*rows, 16, 3, validation_split=0.2, verbose=0)
    loss, accuracy = model.evaluate(*rows, verbose=0)
    losses = history.history["val_loss"]
    return losses, loss, accuracy, model.predict(rows[0], verbose=0)


def own_fit(make_model, rows):
    """Arguments of a class reach its own `fit`, once, and Keras's `fit` the others."""
    model = Approximator()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(dataset=rows, epochs=1, verbose=0, adapter=None)
    return *model.get_weights(), model.evaluate(rows, verbose=0)


def in_callbacks(make_model, rows, is_alone=False):
    """`evaluate`, `predict`, and a fit of a copy: of all ranks, or of the first."""
    model, callback = make_model(), Evaluates(rows)
    given = keras_dist.first_rank_only(callback) if is_alone else callback
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    model.fit(*rows, callbacks=[given], **options)
    return *model.get_weights(), [] if is_alone else callback.found


class Distills(keras.utils.PyDataset):
    """Targets that another model predicts."""

    def __init__(self, teacher, x, **options):
        super().__init__(**options)
        self.teacher, self.x = teacher, x

    def __len__(self):
        return 5

    def __getitem__(self, index):
        x = self.x[20 * index : 20 * index + 20]
        return x, self.teacher.predict(x, verbose=0)


def in_a_thread(make_model, rows):
    """One that the script starts and waits for."""
    found = []

    def train():
        model = make_model()
        model.fit(*rows, batch_size=16, verbose=0)
        found.extend(model.get_weights())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return found


@slow_on_three
@pytest.mark.parametrize(
    "work",
    shortened(
        [calls, own_fit, in_callbacks, partial(in_callbacks, is_alone=True)]
        + [in_a_thread],
        {calls, own_fit},
    ),
)
def test_methods_of_keras_give_what_one_process_has(world, rows, make_model, work):
    """Wherever a script calls them; then they are as before."""
    work, trained, plain_fit = partial(work, make_model, rows), [], keras.Model.fit
    keras.utils.set_random_seed(5)
    [plain] = distribute_jobs([work])
    keras.utils.set_random_seed(5)
    with pytest.MonkeyPatch.context() as patch, keras_dist.distribute():
        own_fit = fit.fit
        patch.setattr(fit, "fit", lambda *all: trained.append(1) or own_fit(*all))
        distributed = work()
    assert bool(trained) == (world.size > 1)
    assert_close(distributed, plain)
    assert keras.Model.fit is plain_fit


@slow_on_three
@several
@pytest.mark.parametrize(
    "kind", shortened(["sequence", "threads", "generator"], {"sequence"})
)
def test_data_predicts_by_another_model_on_each_rank_alone(
    rows, make_model, kind, monkeypatch
):
    """The ranks read at times of their own: a collective there meets any other one."""

    def train():
        batches = Distills(make_model(), rows[0], workers=1 + (kind == "threads"))
        generated = (batches[index % 5] for index in itertools.count())
        data, steps = (generated, 5) if kind == "generator" else (batches, None)
        model = make_model(seed=4, jit_compile=False)
        how = {"shuffle": False, "verbose": 0, "steps_per_epoch": steps}
        return model.fit(data, **how).history["loss"], *model.get_weights()

    [plain] = distribute_jobs([train])
    met, meet = [], distribution._meet
    with keras_dist.distribute():
        monkeypatch.setattr(
            distribution,
            "_meet",
            lambda model, name: met.append(name) or meet(model, name),
        )
        assert_close(train(), plain)
    assert met == ["fit"]


@several
def test_a_plain_fit_in_another_thread_is_keras_own(rows):
    """While this one traces and trains, its sums are not taken for all ranks'."""

    def make():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        sgd = keras.optimizers.SGD(1e-3)
        return make_compiled(perceptron, sgd, loss, run_eagerly=True)

    expected, other, model = make(), make(), make()
    given = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    expected.fit(*rows, **given)
    # A rank's own fit: it has no collective.
    thread = threading.Thread(target=lambda: other.fit(*rows, **given))
    thread.start()
    keras_dist.dist_fit(model, *rows, **given)
    thread.join()
    assert_close(other.get_weights(), expected.get_weights(), 1e-6)
    assert tf.executing_eagerly()


@slow_on_three
@several
def test_what_cannot_be_made_equal_is_an_error(world, rows, make_model):
    """Loops by batches, and updates of a loop; `DistributedOptimizer` allows them."""
    model = make_model()
    many = keras_dist.DistributedModel(model)  # the same inside and outside
    with keras_dist.distribute():
        methods = [model.train_on_batch, model.test_on_batch]
    for method in (*methods, many.train_on_batch, many.test_on_batch):
        with pytest.raises(RuntimeError, match="_on_batch.*test_distribute.*Distribut"):
            method(*rows)
    with keras_dist.distribute():
        model.build((None, 5))
        grads = [tf.zeros_like(v) for v in model.trainable_variables]
        with pytest.raises(RuntimeError, match=r"loop of your own.*test_distribute.py"):
            model.optimizer.apply_gradients(
                zip(grads, model.trainable_variables, strict=True)
            )
        keras_dist.DistributedOptimizer(model.optimizer)
        model.optimizer.apply(grads, model.trainable_variables)
        model.test_on_batch(*rows)
    many.train_on_batch(*rows)
    assert "sample_weight" in inspect.signature(many.train_on_batch).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        keras_dist.distribute(bach="global")
    with pytest.raises(ValueError, match="`batch` must be"):
        keras_dist.distribute("all")


@slow_on_three
@several
def test_ranks_that_call_other_methods(world, rows, make_model):
    """An error on all ranks, with the line of each."""
    model, plain_fit = make_model(), keras.Model.fit
    with keras_dist.distribute(), pytest.raises(ValueError) as raised:
        if world.rank == 0:
            model.fit(*rows, verbose=0)
        model.evaluate(*rows, verbose=0)
    assert "rank 0: `fit` of a Sequential at test_distribute.py" in str(raised.value)
    assert "rank 1: `evaluate` of a Sequential" in str(raised.value)
    assert keras.Model.fit is plain_fit


class Probes(keras.callbacks.Callback):
    """After each epoch, trains a model on what the trained one has learned."""

    def __init__(self, make_model, rows, ends=None):
        super().__init__()
        self.make_model, self.rows, self.ends = make_model, rows, ends

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.ends:
            raise Ended
        x, y = self.rows
        learned = self.make_model(), x * np.asarray(self.model(x)), y
        history = keras.Model.fit(*learned, batch_size=32, shuffle=False, verbose=0)
        logs["probe"] = history.history["loss"][0]


@slow_on_three
def test_fits_of_a_script_resume_by_their_number(rows, make_model, folder, monkeypatch):
    """KERAS_DIST_RESUME: the second fit continues as the second.

    Fits in callbacks, of which a process that resumes makes fewer, do not count.
    """

    def train(ends=None):
        monkeypatch.setattr(distribution, "_fits", itertools.count(1))  # a new process
        probes, options = Probes(make_model, rows, ends), {"shuffle": False}
        history = make_model().fit(*rows, 32, 3, 0, callbacks=[probes], **options)
        after = make_model().fit(*rows, 32, 1, 0, **options)
        return history.history["probe"], after.history["loss"]

    [expected] = distribute_jobs([train])
    monkeypatch.setenv("KERAS_DIST_RESUME", str(folder))
    with keras_dist.distribute():
        with pytest.raises(Ended):
            train(ends=1)
        assert_close(train(), expected)
    assert len(list(folder.glob("fit_*"))) == 2


@several
def test_a_script_for_another_backend_is_told_of_tensorflow(world, rows, monkeypatch):
    """Keras was imported before the script's first line, which is too late then."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with keras_dist.distribute(), warned("KERAS_BACKEND=jax") as texts:
        make_compiled(perceptron, "sgd", "mse").fit(*rows, verbose=0)
    assert len(texts) == (world.rank == 0)
