"""A row that makes a gradient NaN is found, whichever rank reads it."""

import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, largest_difference, raises_everywhere

import keras_dist

several_ranks = pytest.mark.several_ranks
three_ranks = pytest.mark.three_ranks

POISONED = 37  # of 96 rows


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks."""
    return Path(keras_dist.broadcast(str(tmp_path)))


@pytest.fixture
def poisoned(rows):
    """96 rows, in one of which one number of `x` is NaN."""
    x, y = (array[:96].copy() for array in rows)
    x[POISONED, 2] = np.nan
    return x, y


def batch_size():
    """So that the global batch has 12 rows: 8 steps, and row 37 in the fourth."""
    return 12 // keras_dist.size()


def fit(model, data, report, *callbacks, **arguments):
    """One epoch, with the warnings of this rank."""
    given = {"batch_size": batch_size(), "verbose": 0, "shuffle": False} | arguments
    x, y = data if isinstance(data, tuple) else (data, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = keras_dist.dist_fit(
            model, x, y, callbacks=[report, *callbacks], lr_scaling="none", **given
        )
    warned = [str(w.message) for w in caught if "left out" in str(w.message)]
    return history, warned


def without_fourth_batch(data):
    """The same rows without those of the poisoned global batch."""
    return tuple(np.concatenate([array[:36], array[48:]]) for array in data)


def difference(model, oracle):
    """Largest difference in weights and state."""
    return largest_difference(model, oracle)


EXECUTIONS = {
    "eagerly": {},
    "a graph": {"run_eagerly": False, "jit_compile": False, "steps_per_execution": 3},
    "xla": {"run_eagerly": False, "jit_compile": True},
}


@pytest.mark.parametrize(
    "execution", [pytest.param("eagerly", marks=three_ranks), "a graph", "xla"]
)
def test_skipped_the_model_is_as_if_there_had_been_no_such_batch(
    execution, poisoned, make_model, folder
):
    """Weights, momentum, metrics: those of one process without that global batch."""
    metrics = [keras.metrics.BinaryAccuracy()]
    model = make_model(metrics=metrics, **EXECUTIONS[execution])
    report = keras_dist.NanReport("skip", folder)
    history, warned = fit(model, poisoned, report)
    oracle = make_model(metrics=[keras.metrics.BinaryAccuracy()])
    expected = oracle.fit(
        *without_fourth_batch(poisoned), batch_size=12, shuffle=False, verbose=0
    )
    assert int(model.optimizer.iterations) == 7
    assert difference(model, oracle) < 1e-6
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, abs=1e-6)
    rank = (POISONED - 36) % keras_dist.size()
    [found] = report.found
    assert (found.rank, found.epoch, found.step) == (rank, 0, 3)
    assert (found.inputs, found.rows, found.is_output) == (("x",), (POISONED,), True)
    # Keras numbers layers, and ranks may have made other models before.
    assert found.layer == keras_dist.gather(model.layers[0].name)[rank]
    assert len(warned) == (keras_dist.rank() == 0)
    if warned:
        assert f"Epoch 1, step 4: the gradients of rank {rank} are not" in warned[0]
        assert f"row {POISONED} of the data" in warned[0]
    keras_dist.gather("written")
    with np.load(found.file, allow_pickle=False) as saved:
        assert (saved["x"] == poisoned[0][saved["rows"]]).mean() > 0.9
        assert saved["rows"][saved["places_to_blame"]] == [POISONED]
        assert len(saved["y"]) == batch_size()
    assert [path.name for path in folder.iterdir()] == [Path(found.file).name]
    if keras_dist.size() > 1:
        assert_equal_to_the_bit(model)


@several_ranks
@three_ranks
@pytest.mark.slow_on_three
def test_stop_and_raise_act_on_all_ranks_after_the_same_step(
    poisoned, make_model, folder
):
    """The weights stay those before it, also when rows are shuffled."""
    model, oracle = make_model(), make_model()
    stops = keras_dist.NanReport("stop", folder)
    history, warned = fit(model, poisoned, stops, epochs=3)
    assert len(warned) == (keras_dist.rank() == 0)
    assert history.epoch == [0]
    x, y = (array[:36] for array in poisoned)
    oracle.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert difference(model, oracle) < 1e-6

    model = make_model()
    raises = keras_dist.NanReport("raise", folder)
    messages = raises_everywhere(
        FloatingPointError, lambda: fit(model, poisoned, raises, shuffle=True)
    )
    assert len(set(messages)) == 1
    assert f"To blame: row {POISONED} of the data" in messages[0]
    steps = int(model.optimizer.iterations)
    assert keras_dist.gather(steps) == [raises.found[0].step] * keras_dist.size()
    assert np.isfinite(model.get_weights()[0]).all()
    assert_equal_to_the_bit(model)
    # The model is a plain one again.
    clean = tuple(np.nan_to_num(array) for array in poisoned)
    assert fit(model, clean, keras_dist.NanReport("raise", folder))[1] == []


@several_ranks
def test_a_label_and_a_large_number_are_found_too(rows, make_model, folder):
    """No output is wrong for a label; a row that overflows is seen by its output."""
    x, y = (array[:96].copy() for array in rows)
    y[POISONED] = np.nan
    report = keras_dist.NanReport("skip", folder)
    fit(make_model(), (x, y), report)
    [found] = report.found
    assert (found.inputs, found.rows, found.is_output) == (("y",), (POISONED,), False)
    assert found.layer == "dense_1" or found.layer.startswith("dense")

    x, y = (array[:96].copy() for array in rows)
    x[POISONED] = 3e38
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Lambda(lambda t: t, name="same"),
            keras.layers.Dense(1, kernel_initializer="ones", name="sums"),
        ]
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse", run_eagerly=True)
    report = keras_dist.NanReport("skip", folder)
    fit(model, (x, y), report)
    [found] = report.found
    assert (found.inputs, found.rows) == ((), (POISONED,))
    assert (found.layer, found.is_output) == ("sums", True)


@several_ranks
def test_statistics_and_accumulated_gradients_are_not_spoiled(poisoned, folder):
    """The moving mean of the rank that read it; sums over several batches."""

    def make(batch_norm):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        if batch_norm:
            model.add(keras.layers.BatchNormalization())
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(adam, "mse", run_eagerly=True)
        return model

    model, oracle = make(False), make(False)
    report = keras_dist.NanReport("skip", folder)
    _, warned = fit(model, poisoned, report)
    assert len(report.found) == 1
    oracle.fit(*without_fourth_batch(poisoned), batch_size=12, shuffle=False, verbose=0)
    assert difference(model, oracle) < 1e-5

    model = make(True)
    fit(model, poisoned, keras_dist.NanReport("skip", folder))
    assert all(np.isfinite(array).all() for array in model.get_weights())
    assert_equal_to_the_bit(model)


@several_ranks
def test_batches_of_a_data_set_are_named(poisoned, make_model, folder):
    """By their number; the row by its index in the batch."""
    data = tf.data.Dataset.from_tensor_slices(poisoned).batch(6)
    report = keras_dist.NanReport("skip", folder)
    fit(make_model(), data, report, batch_size=None)
    [found] = report.found
    assert found.batches == (POISONED // 6,)
    assert (found.rows, found.is_numbered) == ((POISONED % 6,), False)
    assert found.rank == POISONED // 6 % keras_dist.size()


@several_ranks
def test_a_loss_scale_is_not_reported_but_a_poisoned_row_is(poisoned, folder):
    """Its first steps overflow: that is how the scale is adjusted."""

    def fitted(data):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=2.0**127
        )
        model.compile(scaled, "mse", run_eagerly=True)
        report = keras_dist.NanReport("raise", folder)
        messages = []
        try:
            fit(model, data, report, epochs=2)
        except FloatingPointError as error:
            messages.append(str(error))
        return float(scaled.dynamic_scale.numpy()), messages

    clean = tuple(np.nan_to_num(array) for array in poisoned)
    scale, messages = fitted(clean)
    assert scale < 2.0**127 and not messages
    _, messages = fitted(poisoned)
    assert f"row {POISONED} of the data" in messages[0]


@several_ranks
@three_ranks
def test_terminate_on_nan_stops_all_ranks_after_the_same_batch(poisoned, make_model):
    """Although one rank alone has seen it; one process stops one batch earlier."""
    batches = []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

    model = make_model()
    history = keras_dist.dist_fit(
        model,
        *poisoned,
        batch_size=batch_size(),
        shuffle=False,
        epochs=3,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN(), Counts()],
    )
    assert history.epoch == [0]
    assert keras_dist.gather(batches) == [[0, 1, 2, 3, 4]] * keras_dist.size()


def test_unusable_settings_are_errors(world, poisoned, make_model):
    """Unknown ones, and ones that differ between the ranks."""
    with pytest.raises(ValueError, match="Received: action='nothing'"):
        keras_dist.NanReport("nothing")
    if world.size > 1:
        action = "skip" if world.rank else "stop"
        messages = raises_everywhere(
            ValueError,
            lambda: fit(make_model(), poisoned, keras_dist.NanReport(action)),
        )
        assert "rank 0: action='stop'; rank 1: action='skip'" in messages[0]
        messages = raises_everywhere(
            ValueError,
            lambda: fit(make_model(), poisoned, keras_dist.NanReport(), sync="every:2"),
        )
        assert "Received: ranks that make steps of their own" in messages[0]


@several_ranks
def test_gradients_of_every_exchange_are_checked(poisoned, make_model, folder):
    """In two bytes a number, as rows of an `Embedding`, and beside local layers."""
    for compression in ("fp16", "bf16"):
        model = make_model()
        report = keras_dist.NanReport("skip", folder)
        fit(model, poisoned, report, compression=compression)
        assert [found.rows for found in report.found] == [(POISONED,)]
        assert np.isfinite(model.get_weights()[0]).all()

    x, y = np.arange(96) % 50, poisoned[1].copy()
    y[POISONED] = np.inf
    table = keras.layers.Embedding(500, 4)
    last = keras.layers.Dense(1, name="last")
    model = keras.Sequential([keras.Input((), dtype="int32"), table, last])
    model.compile("adam", "mse", run_eagerly=True)
    report = keras_dist.NanReport("skip", folder)
    fit(model, (x, y), report, local_layers=[last])
    [found] = report.found
    assert (found.rows, found.layer) == ((POISONED,), last.name)
    for array in model.get_weights():
        assert np.isfinite(array).all()
