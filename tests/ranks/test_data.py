"""Every kind of data trains, and the plan says how it is sharded."""

import importlib
import itertools
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    largest_difference,
    shortened,
)
from harness.data_kinds import Sequence
from harness.models import make_compiled, perceptron

import keras_dist

_LOADS_PLAIN = """
import sys
class Blocks:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("keras_dist", "horovod"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocks())
import keras
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    rate = f"{float(model.optimizer.learning_rate):.6f}"
    names = type(model).__name__, type(model.optimizer).__name__
    print(*names, rate, model.count_params())
"""


def test_the_plan_is_printed_once_and_says_all(world, rows, make_model, capsys):
    """One box on the first rank; `verbose=0` silences it."""
    name = "Very" * 30 + "LongLogger"  # longer than the box
    log = type(name, (keras.callbacks.CSVLogger,), {})("/dev/null")
    given = {"batch_size": 8, "steps_per_epoch": 12, "warmup_epochs": 3, "verbose": 2}
    given |= {"validation_data": rows, "callbacks": [log]}
    keras_dist.dist_fit(make_model(), *rows, **given)
    box = capsys.readouterr().out
    if world.rank > 0:
        assert box == ""
    elif world.size == 1:
        assert "1 (serial)" in box and "12 per epoch" in box
    else:
        n = world.size
        for text in (
            f"{n} on 1 host, CPU, ",
            keras_dist.comm.transport_name(),
            f"8 rows per rank, {8 * n} global",
            "101 → ",
            f"12 → {-(-12 // n)} per epoch (steps scaled: divide)",
            f"0.1 → 0.{n} (linear: × {n}, after 3 epochs of warm-up)",
            "arrays, sharded by row, shuffled",
        ):
            assert text in box, text
        lines = [line for line in box.splitlines() if line.startswith(("╭", "│", "╰"))]
        assert len({len(line) for line in lines}) == 1
        assert name in "".join(line[2:-2].strip() for line in lines)
    keras_dist.dist_fit(make_model(), *rows, batch_size=8, verbose=0)
    assert capsys.readouterr().out == ""
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    keras_dist.dist_fit(make_model(keras.optimizers.SGD(schedule)), *rows, verbose=2)
    read = f"schedule read at step × {world.size}" in capsys.readouterr().out
    assert read == (world.rank == 0 and world.size > 1)
    # What is equal stands once.
    model = make_model()
    model.other_optimizer = keras.optimizers.SGD(0.1)
    steps = {"steps_per_epoch": 6, "steps_scaling": "none", "batch": "global"}
    keras_dist.dist_fit(model, *rows, batch_size=8, verbose=2, **steps)
    box = capsys.readouterr().out
    assert box.count("learning rate ") == (world.rank == 0)
    assert ("6 per epoch" in box) == (world.rank == 0)
    assert "→ 6" not in box and "scaled" not in box


class _Series(np.ndarray):
    """Stands in for a Series of pandas, where that is not installed."""


class _Frame:
    """Stands in for a DataFrame: columns of float64 and bool."""

    shape = (96, 2)
    dtypes = (np.dtype("float64"), np.dtype("bool"))

    def __init__(self, columns):
        self.columns = columns

    def __array__(self, dtype=None, copy=None):
        return np.stack([each.astype(dtype or object) for each in self.columns], 1)

    def astype(self, dtype):
        return self.__array__(dtype)


class _SquaredError(keras.losses.Loss):
    """Gives (B, B) for targets (B,), where Keras's own losses add the axis."""

    def call(self, y, prediction):
        return keras.ops.square(y - prediction)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_pandas_series_has_the_axis_that_keras_adds(
    rows, folder, monkeypatch, resumes
):
    """Keras makes (B, 1) of it: inputs, targets, weights and validation data."""

    def make():
        inputs = {name: keras.Input((1,), name=name) for name in "ab"}
        return keras.Model(inputs, keras.layers.Dense(1)(inputs["a"] + inputs["b"]))

    def make_data(convert, batch_size):
        x = {name: convert(rows[0][:96, column]) for column, name in enumerate("ab")}
        y, weight = convert(rows[1][:96]), convert(rows[0][:96, 2] ** 2)
        more = {"batch_size": batch_size, "validation_data": (x, y)}
        return {"x": x, "y": y, "sample_weight": weight} | more

    try:
        series = importlib.import_module("pandas").Series
    except ImportError:
        modules = types.SimpleNamespace(Series=_Series)
        monkeypatch.setitem(sys.modules, "pandas", modules)

        def series(array):
            return array.view(_Series)

    assert_equals_one_process(
        lambda: make_compiled(make, "sgd", _SquaredError(), run_eagerly=True),
        lambda size: make_data(series, size),
        plain_data=lambda size: make_data(lambda array: array[:, None], size),
        options={"resume": folder} if resumes else {},
    )


@pytest.mark.parametrize("resumes", [False, True])
def test_a_fit_that_begins_at_a_later_epoch_begins_with_the_first_row(
    rows, folder, resumes
):
    """With `steps_per_epoch`, too: Keras begins each fit with a new iterator."""
    assert_equals_one_process(
        lambda: make_compiled(perceptron, "sgd", "mse", run_eagerly=True),
        tuple(array[:96] for array in rows),
        16,
        batch="global",
        options={"resume": folder} if resumes else {},
        **{"steps_per_epoch": 3, "initial_epoch": 1, "epochs": 3},
    )


def test_a_pandas_frame_with_floats_and_bools_is_cast_to_floats(rows, monkeypatch):
    """As by Keras, with `validation_split`, too; its values are objects."""
    x, y = (array[:96] for array in rows)
    columns = x[:, 0].astype("float64"), x[:, 1] > 0
    try:
        frame = importlib.import_module("pandas").DataFrame(dict(enumerate(columns)))
    except ImportError:
        frame, modules = _Frame(columns), types.SimpleNamespace(DataFrame=_Frame)
        monkeypatch.setitem(sys.modules, "pandas", modules)

    def make():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    assert_equals_one_process(
        lambda: make_compiled(make, "sgd", "mse", run_eagerly=True),
        (frame, y),
        plain_data=(np.stack(columns, 1).astype("float32"), y),
        validation_split=0.25,
    )


@pytest.mark.several_ranks
def test_data_already_split_trains_alike(world, rows, make_model, fit_plainly):
    """Arrays with `shard="none"`, a data set, a sequence and a generator."""
    x, y = (array[:96] for array in rows)
    size, rank = world.size, world.rank
    own = x[rank::size], y[rank::size]
    steps = 96 // (8 * size)

    batches = Sequence(*own, [8])
    endless = (batches[index % steps] for index in itertools.count())
    dataset = tf.data.Dataset.from_tensor_slices(own).batch(8)
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    sgd = keras.optimizers.SGD(0.1 * size)
    oracle = fit_plainly(sgd, x, y, batch_size=8 * size, epochs=2, rate=0.1)
    arrays = {"x": own[0], "y": own[1], "shard": "none"}
    shared = {"batch": "global", "lr_scaling": "linear"}
    kinds = {
        "arrays": arrays | {"batch_size": 8},
        "steps": arrays | {"steps_per_epoch": steps * size},
        "steps of all": arrays | {"steps_per_epoch": steps, **shared},
        "dataset": {"x": dataset},
        "endless": {"x": dataset.repeat(), "steps_per_epoch": steps * size},
        "sequence": {"x": batches},
        "generator": {"x": endless, "steps_per_epoch": steps * size},
    }
    for kind, data in kinds.items():
        model = make_model(keras.optimizers.SGD(0.1))
        keras_dist.dist_fit(model, **data, **arguments)
        assert largest_difference(model, oracle) < 1e-5, kind
        assert_equal_to_the_bit(model)


def test_a_distributed_model_is_the_model(world, rows, make_model, fit_plainly):
    """`fit` with defaults given once; every other attribute is the model's."""
    model = make_model(keras.optimizers.SGD(0.1))
    many = keras_dist.DistributedModel(model, lr_scaling="none")
    x, y = (array[:96] for array in rows)
    many.fit(x, y, 8, epochs=1, shuffle=False, verbose=0)
    oracle = fit_plainly(keras.optimizers.SGD(0.1), x, y, 8 * world.size)
    assert largest_difference(model, oracle) < 1e-5
    assert many.count_params() == model.count_params()
    many.stop_training = True
    assert model.stop_training and "summary" in dir(many)
    assert (many(x[:2]) == model(x[:2])).numpy().all()
    with pytest.raises(TypeError):
        keras_dist.DistributedModel(model, batches=3)


@pytest.mark.two_ranks
def test_saved_files_are_plain(world, rows, tmp_path, make_model):
    """Saved during or after the fit, they load without keras_dist and Horovod."""
    model = make_model(keras.optimizers.Adam(0.01))
    during, after = str(tmp_path / "during.keras"), str(tmp_path / "after.keras")
    checkpoint = [keras.callbacks.ModelCheckpoint(during)]
    keras_dist.dist_fit(model, *rows, callbacks=checkpoint, verbose=0)
    model.save(after)
    assert keras.optimizers.serialize(model.optimizer)["module"] == "keras.optimizers"
    if world.rank == 0:
        script = [sys.executable, "-c", _LOADS_PLAIN, during, after]
        printed = subprocess.check_output(script, text=True).splitlines()
        # The unscaled rate, and all weights.
        shown = f"Sequential Adam 0.010000 {model.count_params()}"
        assert printed == [shown] * 2
    keras_dist.gather(None)  # the others wait, or the launcher ends a slow first rank


class Knows(keras.Sequential):
    """Notes the rows of batches, as far as their shapes have them."""

    def train_step(self, data):
        self.known["train"] = data[0].shape[0]
        return super().train_step(data)

    def test_step(self, data):
        self.known["test"] = data[0].shape[0]
        return super().test_step(data)


@pytest.mark.several_ranks
@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("kind", "batch"),
    shortened(
        itertools.product(["memory", "a file", "a stream"], ["rank", "global"]),
        {("a file", "rank"), ("a stream", "global")},
    ),
)
def test_a_step_knows_the_rows_of_a_batch_as_in_keras(world, tmp_path, kind, batch):
    """They are in a batch's shape where all batches have as many."""
    size = 12 if batch == "global" else 4

    def train(fit, count, **options):
        x, y = np.zeros((count, 5), "float32"), np.zeros((count, 1))
        given = {"validation_data": (x[:48], y[:48]), "verbose": 0}
        given |= {"validation_batch_size": 4, "batch_size": size}
        if kind == "a file":
            np.save(tmp_path / "x.npy", x)
            x = np.load(tmp_path / "x.npy", mmap_mode="r")
        data = x, y
        if kind == "a stream":
            rows = tf.data.Dataset.from_tensor_slices(data)
            batches = rows.batch(given.pop("batch_size"), drop_remainder=count == 96)
            data = (batches.filter(lambda *_: True),)  # of unknown length
        layers = [keras.Input((5,)), keras.layers.Dense(1)]
        model = make_compiled(lambda: Knows(layers), "sgd", "mse", run_eagerly=False)
        model.known = {}
        fit(model, *data, **given, **options)
        return dict(model.known)

    each = size // (world.size if batch == "global" else 1)
    for count, expected, found in ((96, size, each), (97, None, None)):
        assert train(keras.Model.fit, count) == {"train": expected, "test": 4}
        known = train(keras_dist.dist_fit, count, batch=batch)
        assert known == {"train": found, "test": 4}


@pytest.mark.several_ranks
@pytest.mark.parametrize("as_data", shortened(["arrays", "dataset"], {"arrays"}))
def test_steps_are_whole_executions_as_in_keras(as_data):
    """Steps of a validation, `evaluate` and `predict` that three do not divide."""
    x, y = np.random.default_rng(0).random((48, 3)), np.arange(48.0)[:, None]

    def run(fit, evaluate, predict):
        model = make_compiled(linear, "sgd", "mse", steps_per_execution=3)
        data = (x, y) if as_data == "arrays" else batches()
        given = {"validation_data": data, "validation_steps": 4, "verbose": 0}
        sizes = {} if as_data == "dataset" else {"validation_batch_size": 6}
        history = fit(model, x, y, batch_size=6, shuffle=False, **sizes, **given)
        loss = evaluate(model)(x, y, batch_size=6, steps=4, verbose=0)
        rows = predict(model)(x, batch_size=6, steps=4, verbose=0)
        return history.history["loss"], history.history["val_loss"], loss, len(rows)

    def batches():
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(6)

    def linear():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def fit(model, *args, **given):
        return keras_dist.dist_fit(model, *args, batch="global", **given)

    def ours(model):
        return keras_dist.DistributedModel(model, batch="global")

    plain = run(
        keras.Model.fit, lambda model: model.evaluate, lambda model: model.predict
    )
    found = run(fit, lambda m: ours(m).evaluate, lambda m: ours(m).predict)
    assert found[-1] == plain[-1] == 36
    np.testing.assert_allclose(np.hstack(found), np.hstack(plain), rtol=1e-5)


class Weighted(keras.Model):
    """Its batches have a weight of the loss beside their rows, a number."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x)) ** 2) * tf.cast(weight, "float32")
        variables = [v.value for v in self.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.several_ranks
def test_a_number_beside_the_rows_of_a_batch_goes_to_every_rank():
    """A temperature, or the number of a task."""
    x = np.random.default_rng(0).random((30, 3)).astype("float32")
    rows = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(7)
    numbers = tf.data.Dataset.from_tensor_slices(0.5 + np.arange(5.0))
    data = tf.data.Dataset.zip(rows, numbers).map(lambda xy, n: (*xy, n))
    found = []
    for fit in keras.Model.fit, keras_dist.dist_fit:
        model = Weighted()
        model(x[:2])
        model.compile(keras.optimizers.SGD(0.05))
        is_ours = fit is keras_dist.dist_fit
        fit(
            model, data, epochs=2, verbose=0, **({"batch": "global"} if is_ours else {})
        )
        found.append(model)
    assert largest_difference(*found) < 1e-6
