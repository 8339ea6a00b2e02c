"""The user's callbacks: on all ranks or on one, and errors in them."""

import contextlib
import copy
import pickle
import sys
import types
from functools import partial

import keras
import pytest
from harness.claims import (
    assert_close,
    assert_equal_to_the_bit,
    assert_same_bits,
    gather_errors,
    raises_everywhere,
    shortened,
    slow_on_three,
    warned,
)
from harness.models import vectors

import keras_dist
from keras_dist.callbacks.user_callbacks import reads_batch_logs

several_ranks = pytest.mark.several_ranks


class Fails(keras.callbacks.Callback):
    """Raises at one hook, on the last rank: at batches when it is called twice."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.fail)
        self.calls_left = 2 if "batch" in hook else 1

    def fail(self, *args, **kwargs):
        self.calls_left -= 1
        if keras_dist.rank() == keras_dist.size() - 1 and not self.calls_left:
            raise KeyError("tea")


def fit(model, rows, *callbacks, **more):
    """Two epochs of a few steps, with an evaluation in each."""
    x, y = (array[: 32 * keras_dist.size()] for array in rows)
    held_out = x[: 16 * keras_dist.size()], y[: 16 * keras_dist.size()]
    given = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": held_out}
    return keras_dist.dist_fit(model, x, y, callbacks=list(callbacks), **given | more)


@several_ranks
def test_a_path_of_each_rank_is_that_of_the_first(rows, make_model, folder):
    """As of a name with the time; each rank can read the file; a warning says so."""
    path = f"{folder}/{keras_dist.rank()}.weights.h5"
    saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    with warned("path of a ModelCheckpoint") as texts:
        fit(make_model(), rows, saves, epochs=1)
    assert len(texts) == (keras_dist.rank() == 0)
    assert saves.filepath == f"{folder}/0.weights.h5"
    make_model().load_weights(saves.filepath)


def test_a_callback_may_pickle_and_copy_the_model(rows, make_model):
    """And its optimizer; what comes back is plain, with the same weights."""
    copies = []

    class Pickles(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pickled = pickle.loads(pickle.dumps(self.model))
            for made in (pickled, copy.deepcopy(self.model)):
                copies.append((made, self.model.get_weights()))
            pickle.loads(pickle.dumps(self.model.optimizer))

    model = make_model()
    fit(model, rows, Pickles(), epochs=1)
    assert len(copies) == 2
    for made, weights in copies:
        assert type(made) is type(model)
        assert_same_bits(made.get_weights(), weights)


HOOKS = [
    "set_model on_train_batch_end on_test_end on_epoch_end",
    "on_train_begin on_epoch_begin on_train_batch_begin",
    "on_test_begin on_test_batch_end on_train_end",
]


@slow_on_three
@several_ranks
@pytest.mark.parametrize("hooks", shortened(HOOKS, [HOOKS[0]]))
def test_an_error_on_one_rank_is_one_on_all(rows, make_model, hooks):
    """At any hook: its own error there; elsewhere one that names the rank."""
    last = keras_dist.size() - 1
    elsewhere = "RankError", f"On rank {last}: KeyError: 'tea'"
    model = make_model()
    for hook in hooks.split():
        first = int(model.optimizer.iterations)
        call = partial(fit, model, rows, Fails(hook), epochs=1)
        errors = gather_errors(Exception, call)
        assert errors == [elsewhere] * last + [("KeyError", "'tea'")], hook
        if hook == "on_train_batch_end":  # raised at the second, before a third update
            steps = int(model.optimizer.iterations) - first
            assert keras_dist.gather(steps) == [2] * (last + 1)
    # The model is a plain one again, and trains without an error.
    assert fit(model, rows).epoch == [0, 1]
    assert_equal_to_the_bit(model)


@several_ranks
def test_an_error_in_an_evaluation_or_a_prediction_is_one_on_all(rows, make_model):
    """Methods of a `DistributedModel` take callbacks too."""
    last = keras_dist.size() - 1
    model = keras_dist.DistributedModel(make_model())
    for method, hook in (
        (model.evaluate, "on_test_batch_end"),
        (model.evaluate, "on_test_end"),
        (partial(model.predict, batch_size=8), "on_predict_batch_end"),
    ):
        given = rows if method == model.evaluate else rows[:1]
        how = {"callbacks": [Fails(hook)], "verbose": 0}
        errors = gather_errors(Exception, partial(method, *given, **how))
        assert [kind for kind, _ in errors] == ["RankError"] * last + ["KeyError"]
    assert len(model.evaluate(*rows, verbose=0)) == 2


@pytest.mark.three_ranks
def test_a_marked_callback_runs_on_the_first_rank_only(world, rows, make_model):
    """It may evaluate on one rank: the others take no part, and read what it found."""
    calls = []

    class Marked(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.found = []

        def on_epoch_end(self, epoch, logs=None):
            x, y = rows
            loss = self.model.evaluate(x[:7], y[:7], verbose=0)[0]
            self.found.append(loss)
            calls.append(epoch)
            if epoch == 1:
                self.model.stop_training = True

    class Everywhere(Marked):
        def on_epoch_end(self, epoch, logs=None):
            self.found.append(epoch)

    marked, everywhere = keras_dist.first_rank_only(Marked()), Everywhere()
    model = make_model()
    history = fit(model, rows, everywhere, marked, epochs=4)
    assert history.epoch == everywhere.found == [0, 1]
    assert keras_dist.gather(len(calls)) == [2] + [0] * (world.size - 1)
    assert keras_dist.gather(marked.found) == [marked.found] * world.size
    if world.rank == 0:
        x, y = rows
        assert marked.found[-1] == model.evaluate(x[:7], y[:7], verbose=0)[0]
    assert_equal_to_the_bit(model)


@several_ranks
def test_a_collective_in_a_callback_of_one_rank_is_an_error_on_all(rows, make_model):
    """The others would not come to it."""

    gathers = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: keras_dist.gather(epoch)
    )
    marked = keras_dist.first_rank_only(gathers)
    call = partial(fit, make_model(), rows, marked, epochs=1)
    raises_everywhere(Exception, call, "no collective can be in it")


@several_ranks
def test_ranks_may_be_given_different_callbacks(world, rows, make_model, folder):
    """As in scripts with `if rank == 0`: a reader still waits for the writer."""

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            twin.load_weights(folder / f"{epoch}.weights.h5")

    class Writes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.save_weights(folder / f"{epoch}.weights.h5")

    twin = make_model()
    writes = [keras_dist.first_rank_only(Writes())] if world.rank == 0 else []
    model = make_model()
    fit(model, rows, *writes, Reads())
    assert_same_bits(model.get_weights(), twin.get_weights())


# Where the classes are defined that users import.
_TRACKERS = (
    ("mlflow.keras.callback", "MlflowCallback"),
    ("mlflow.tensorflow.callback", "MlflowModelCheckpointCallback"),
    ("wandb.integration.keras.callbacks.metrics_logger", "WandbMetricsLogger"),
    ("wandb.integration.keras.keras", "WandbCallback"),
    ("comet_ml.callbacks.keras", "CometKerasCallback"),
    ("neptune_tensorflow_keras.impl", "NeptuneCallback"),
    ("neptune.integrations.tensorflow_keras", "NeptuneCallback"),
    ("clearml.binding.frameworks.tensorflow_bind", "ClearMLCallback"),
)


def stand_in(module, name):
    """An object of a class that a user has made from one with this name."""

    def on_epoch_end(self, epoch, logs=None):
        self.logged.append(dict(logs))

    base = type(
        name,
        (keras.callbacks.Callback,),
        {"__module__": module, "on_epoch_end": on_epoch_end},
    )
    found = type("Own", (base,), {})()
    found.logged = []
    return found


@slow_on_three
def test_trackers_run_on_the_first_rank_with_the_logs_of_all(rows, make_model):
    """Classes that inherit from theirs, too; the list is the same on all ranks."""
    callbacks = [stand_in(*names) for names in _TRACKERS]
    others = [stand_in("my.wandb", "Logger"), stand_in("wandbox", "Logger")]
    history = fit(make_model(), rows, *callbacks, *others).history
    logs = [{name: history[name][e] for name in history} for e in (0, 1)]
    assert all(callback.logged == logs for callback in others)
    is_first = keras_dist.rank() == 0
    assert all(c.logged == (logs if is_first else []) for c in callbacks)
    expected = 0.1 * keras_dist.size()
    assert history["effective_learning_rate"] == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    "name", shortened(["model.keras", "model.weights.h5"], {"model.weights.h5"})
)
def test_a_full_disk_leaves_the_file_before(
    rows, make_model, folder, name, limit_files
):
    """Under `ModelCheckpoint`; all ranks raise, and no partial file is left."""
    model, before = make_model(), []

    def fill(epoch, logs):
        if epoch == 1 and keras_dist.rank() == 0:
            limit_files(3000)

    watches = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: before.append(model.get_weights()),
        on_epoch_end=fill,
    )
    saves = keras.callbacks.ModelCheckpoint(
        str(folder / name), save_weights_only="weights" in name
    )
    errors = gather_errors(Exception, lambda: fit(model, rows, watches, saves))
    limit_files()
    assert None not in errors
    assert all(message.startswith("On rank 0: ") for _, message in errors[1:])
    assert [path.name for path in folder.iterdir()] == [name]
    twin = make_model(seed=8)
    twin.load_weights(folder / name)
    assert_same_bits(before[1], twin.get_weights())


def test_autologging_logs_on_the_first_rank(rows, make_model, monkeypatch):
    """As MLflow does it: in the place of `Model.fit`, unless it is turned off."""
    off, logged = [], []
    own_fit = keras.Model.fit

    @contextlib.contextmanager
    def disable_autologging():
        off.append(True)
        yield
        off.clear()

    def logging_fit(model, *args, callbacks, **kwargs):
        if not off:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=log))
        return own_fit(model, *args, callbacks=callbacks, **kwargs)

    def log(epoch, logs):
        logged.append(logs["val_loss"])

    utils = types.ModuleType("mlflow.utils.autologging_utils")
    utils.disable_autologging = disable_autologging
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(keras.Model, "fit", logging_fit)
    losses = fit(make_model(), rows).history["val_loss"]
    assert logged == (losses if keras_dist.rank() == 0 else []) and not off


def test_what_the_first_rank_knows_after_the_fit_is_there_on_all(folder):
    """`best` of a checkpoint, and public plain attributes of a marked callback."""

    @keras_dist.first_rank_only
    class Diary(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses, self.note = [], {"epochs": 0}

        def on_epoch_end(self, epoch, logs=None):
            self.losses.append(logs["loss"])
            self.note["epochs"] += 1

    x, y = vectors(24)
    path = f"{folder}/best.weights.h5"
    best = keras.callbacks.ModelCheckpoint(
        path, monitor="loss", save_best_only=True, save_weights_only=True
    )
    diary = Diary()
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [best, diary]
    history = keras_dist.dist_fit(model, x, y, epochs=2, verbose=0, callbacks=callbacks)
    assert best.best == min(history.history["loss"])
    assert diary.losses == history.history["loss"] and diary.note == {"epochs": 2}


class HalvesRate(keras.callbacks.Callback):
    """Halves the rate after a batch with a larger mean loss; stops in an epoch."""

    def __init__(self):
        super().__init__()
        self.logs, self.tested = [], {}

    def on_train_batch_end(self, batch, logs=None):
        if self.logs and logs["loss"] > self.logs[-1]["loss"]:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate / 2
        self.logs.append(dict(logs))
        if len(self.logs) == 11:  # in the third epoch
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        self.tested = dict(logs)

    def on_epoch_end(self, epoch, logs=None):
        # The first rank tests most batches; by its last one, all ranks have tested all.
        self.logs.append(keras_dist.broadcast(self.tested))


class Older(keras.callbacks.Callback):
    """Reads logs by the older name of the hook."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs or {}))


class OwnLogs(keras.Model):
    """Its step returns the loss of the batch, and the mean, by names of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        loss = keras.losses.mean_squared_error(data[1], self(data[0]))
        return {"now": keras.ops.mean(loss), "so far": logs["loss"]}


@pytest.mark.three_ranks
@several_ranks
@pytest.mark.parametrize("kind", ["metrics", "own logs", "several steps"])
def test_logs_of_batches_are_those_of_one_process(kind):
    """And what a callback decides by them: 1e-5, uneven last batches included."""
    x, y = vectors(45)
    if kind == "own logs":
        make, how = OwnLogs, {}
    else:

        def make():
            layer = keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")
            return keras.Sequential([keras.Input((5,)), layer])

        steps = 2 if kind == "several steps" else 1
        how = {"metrics": ["mae", "auc"], "steps_per_execution": steps}

    def train(fit, **options):
        model = make()
        model.compile(keras.optimizers.SGD(0.9), "mse", jit_compile=False, **how)
        halves, older, printed = HalvesRate(), Older(), []
        lambdas = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: printed.append(logs["loss"])
        )
        callbacks = [halves, older] + [lambdas] * (kind == "metrics")
        rows = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}
        if kind != "own logs":
            rows |= {"validation_data": (x[:30], y[:30]), "validation_batch_size": 4}
        else:
            halves.on_train_batch_end = lambda batch, logs: halves.logs.append(logs)
        fit(model, x, y, callbacks=callbacks, **rows, **options)
        rate = float(model.optimizer.learning_rate)
        return [rate, *printed], halves.logs, older.logs

    expected = train(keras.Model.fit)
    found = train(keras_dist.dist_fit, batch="global")
    assert (expected[0][0] < 0.8) == (kind != "own logs")  # was it halved?
    keras.tree.map_structure(
        lambda own, other: assert_close([own], [other]), found, expected
    )


def test_logs_that_nobody_reads_are_not_exchanged():
    """Nor for the first rank alone: a hook that never loads `logs` does not read it."""

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batch = batch

    class Passes(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, **more):
            self.more = more

    class Keeps(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            self.read = lambda: logs

    hook = "on_train_batch_end"
    lambdas = [
        keras.callbacks.LambdaCallback(**{hook: lambda batch, logs: batch}),
        keras.callbacks.LambdaCallback(**{hook: lambda batch, logs: print(logs)}),
    ]
    others = keras.callbacks.TerminateOnNaN(), keras_dist.first_rank_only(HalvesRate())
    given = Counts(), *others, lambdas[0], lambdas[1], Passes(), Keeps(), HalvesRate()
    assert list(map(reads_batch_logs, given)) == [False] * 4 + [True] * 4
