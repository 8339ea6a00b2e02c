"""Every callback of Keras works in the list of `dist_fit` as in that of `fit`."""

import inspect
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    assert_same_bits,
    shortened,
)

import keras_dist

callbacks = keras.callbacks

# Lists of those that decide, each tried in one fit.
DECIDE = {
    "stop": lambda: [
        callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    ],
    "average": lambda: [callbacks.SwapEMAWeights(swap_on_epoch=True)],
    "rate": lambda: [
        callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10, factor=0.5),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        callbacks.TerminateOnNaN(),
        callbacks.History(),
    ],
}
DECIDERS = {type(member).__name__ for make in DECIDE.values() for member in make()}
WRITE = {"BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint"}
WRITE |= {"ProgbarLogger", "RemoteMonitor", "TensorBoard"}
WITH_HOOKS = {"Callback", "LambdaCallback"}
HOLD_OTHERS = {"CallbackList", "MonitorCallback"}  # a list, and what others derive from


def test_no_callback_of_keras_is_missing_here():
    """Those that Keras has, read from Keras: a new one needs a test."""
    present = {
        name
        for name, member in inspect.getmembers(callbacks, inspect.isclass)
        if issubclass(member, callbacks.Callback)
    }
    assert len(present) > 10
    assert present <= DECIDERS | WRITE | WITH_HOOKS | HOLD_OTHERS


def with_callbacks(data, make_callbacks):
    """A function of the rows of a batch, which returns arguments of `fit`."""
    x, y = data
    given = {"x": x, "y": y}
    return lambda rows: given | {"batch_size": rows, "callbacks": make_callbacks()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("stop", marks=pytest.mark.three_ranks),
        pytest.param("average", marks=[pytest.mark.several_ranks, pytest.mark.long]),
        pytest.param("rate", marks=[pytest.mark.several_ranks, pytest.mark.long]),
    ],
)
def test_callbacks_that_decide_do_so_as_on_one_process(make_model, rows, name):
    """Each rank has another loss of its own, and all decide as one process does.

    The rows to validate on are wrong on all ranks but the first one: its own loss falls
    and would never stop it; that of all rises.
    """
    size, rank = keras_dist.size(), keras_dist.rank()
    x, y = (array[:48] for array in rows)
    validation = x, np.where(np.arange(48) % size != 0, 1 - y, y)
    model, logs, _ = assert_equals_one_process(
        lambda: make_model(keras.optimizers.SGD(1.0, use_ema=name == "average")),
        with_callbacks((x, y), DECIDE[name]),
        validation_data=validation,
        epochs=3,
    )
    if name == "stop" and size > 1:
        assert len(logs["loss"]) == 2
        own = model.evaluate(*(a[rank::size] for a in validation), verbose=0)[0]
        assert len(set(keras_dist.gather(own))) == size


def test_a_callback_list_is_flattened(make_model, rows):
    """Keras accepts a `CallbackList`, too; its callbacks are not called twice."""
    seen = []
    mine = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    given = callbacks.CallbackList([mine, keras_dist.Throughput()])
    keras_dist.dist_fit(make_model(), *rows, callbacks=given, verbose=0)
    assert seen == [0]


@pytest.mark.three_ranks
def test_a_nan_on_one_rank_stops_all_after_the_next_batch(make_model, rows):
    """`TerminateOnNaN` stops one process in its first epoch, and all ranks too."""
    x, y = (array[:96].copy() for array in rows)
    size = keras_dist.size()
    x[8 * size + size - 1] = np.nan  # the last rank's first row of batch 1
    model = make_model()
    given = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
    given["callbacks"] = [callbacks.TerminateOnNaN()]
    assert keras_dist.dist_fit(model, x, y, **given).epoch == [0]
    steps = 2 if size == 1 else 3
    assert keras_dist.gather(int(model.optimizer.iterations)) == [steps] * size
    assert all(np.isnan(array).all() for array in model.get_weights())


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("hook", "compression"),
    shortened(
        [("on_train_batch_end", None), ("on_train_batch_end", "bf16")],
        {("on_train_batch_end", None)},
    )
    + [pytest.param("on_epoch_end", None, marks=pytest.mark.three_ranks)],
)
def test_a_stop_request_of_one_rank_stops_all(make_model, rows, hook, compression):
    """At an epoch's end, or after the next batch; the next fit has no request left."""
    size = keras_dist.size()

    def request(number, logs):
        if number == 1 and keras_dist.rank() == size - 1:
            model.stop_training = True

    model = make_model(run_eagerly=False, jit_compile=compression is None)
    keras_dist.DistributedOptimizer(model.optimizer, compression=compression)
    stop = callbacks.LambdaCallback(**{hook: request})
    call = {"batch_size": 8, "epochs": 3, "verbose": 0}
    history = keras_dist.dist_fit(model, *rows, callbacks=[stop], **call)
    epochs, steps = ([0], 3) if "batch" in hook else ([0, 1], 2 * -(-101 // (8 * size)))
    assert history.epoch == epochs
    assert keras_dist.gather(int(model.optimizer.iterations)) == [steps] * size
    assert_equal_to_the_bit(model)
    assert keras_dist.dist_fit(model, *rows, **call).epoch == [0, 1, 2]


@pytest.mark.several_ranks
def test_a_stop_request_in_a_fit_of_a_callback_stops_all(make_model, rows):
    """That fit, after the next batch; and then the outer one, as on one process."""
    size = keras_dist.size()

    def request(batch, logs):
        if keras_dist.rank() == size - 1:
            model.stop_training = True

    def train_again(epoch, logs):
        model.fit(*rows, batch_size=8, verbose=0, callbacks=[stop])

    model = make_model(run_eagerly=False)
    stop = callbacks.LambdaCallback(on_train_batch_end=request)
    again = callbacks.LambdaCallback(on_epoch_end=train_again)
    given = {"epochs": 3, "batch_size": 24, "callbacks": [again], "verbose": 0}
    assert keras_dist.dist_fit(model, *rows, **given).epoch == [0]
    steps = -(-101 // (24 * size)) + 2
    assert keras_dist.gather(int(model.optimizer.iterations)) == [steps] * size
    assert_equal_to_the_bit(model)


@pytest.mark.several_ranks
def test_hooks_are_called_as_by_one_process(make_model, rows):
    """`LambdaCallback` and a class with state, with the same epochs and batches."""
    data = tuple(array[:48] for array in rows)

    class Remembers(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_begin(self, epoch, logs=None):
            self.seen.append(("begin", epoch))

        def on_batch_end(self, batch, logs=None):
            self.seen.append(("batch", batch, sorted(logs)))

        def on_test_batch_begin(self, batch, logs=None):
            self.seen.append(("test", batch))

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(("end", epoch, sorted(set(logs) - {"rows_per_second"})))

    seen = []

    def make():
        mine = Remembers()
        seen.append(mine.seen)
        return [
            callbacks.LambdaCallback(
                on_train_begin=lambda logs: mine.seen.append("hello"),
                on_train_batch_begin=lambda batch, logs: mine.seen.append(batch),
                on_train_end=lambda logs: mine.seen.append(sorted(logs)[0]),
            ),
            mine,
        ]

    given = with_callbacks(data, make)
    assert_equals_one_process(make_model, given, validation_data=data, epochs=2)
    everyone = keras_dist.gather(seen[-1])
    assert all(each == everyone[0] for each in [*seen, *everyone])
    assert len(everyone[0]) > 20
    assert len(seen) == (2 if keras_dist.rank() == 0 else 1)


def test_writers_write_once_and_readers_wait(make_model, rows, folder, monkeypatch):
    """All of them in one list and one folder, and a callback that reads the files."""
    best = folder / "best.weights.h5"
    size, epochs, posted = keras_dist.size(), 2, []

    def post(url, **sent):
        posted.append(json.loads(json.dumps(sent["json"])))

    monkeypatch.setattr("requests.post", post)

    class Reads(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            saved = keras.models.load_model(folder / f"all-{epoch + 1}.keras")
            assert_same_bits(self.model.get_weights(), saved.get_weights())
            found.append(len((folder / "log.csv").read_text().splitlines()))

    found = []
    given = [
        callbacks.ModelCheckpoint(str(folder / "all-{epoch}.keras")),
        callbacks.CSVLogger(str(folder / "log.csv")),
        Reads(),
        callbacks.ModelCheckpoint(
            str(best), save_best_only=True, save_weights_only=True, monitor="loss"
        ),
        callbacks.ModelCheckpoint(
            str(folder / "{epoch}-{batch}.weights.h5"),
            save_weights_only=True,
            save_freq=3,
        ),
        callbacks.ModelCheckpoint(
            str(folder / "{val_loss:.1f}.keras"),
            save_best_only=True,
            initial_value_threshold=-1.0,
        ),
        callbacks.RemoteMonitor(send_as_json=True),
        callbacks.TensorBoard(str(folder / "board")),
        callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
        *_orbax(folder),
    ]
    x, y = (array[: 8 * size * 4] for array in rows)
    call = {"batch_size": 8, "epochs": epochs, "verbose": 0, "callbacks": given}
    model = make_model()
    keras_dist.dist_fit(model, x, y, validation_data=(x, y), **call)
    # No barrier here: the files exist already, on every rank.
    steps = -(-len(x) // (8 * size))
    batches = [(n // steps + 1, n % steps + 1) for n in range(2, 2 * steps, 3)]
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert names == sorted(
        ["all-1.keras", "all-2.keras", "best.weights.h5", "log.csv"]
        + [f"{epoch}-{batch}.weights.h5" for epoch, batch in batches]
    )
    assert found == [2, 3]
    twin = make_model(seed=9)
    twin.load_weights(best)
    twin.load_weights(folder / "backup" / "latest.weights.h5")
    assert_same_bits(model.get_weights(), twin.get_weights())
    metadata = json.loads((folder / "backup" / "training_metadata.json").read_text())
    assert metadata["epoch"] == epochs
    assert len(list((folder / "board" / "train").glob("events*"))) == 1
    sent = keras_dist.gather([event["epoch"] for event in posted])
    assert sent == [[0, 1]] + [[]] * (size - 1)


def _orbax(folder):
    if not hasattr(callbacks, "OrbaxCheckpoint"):
        return []
    try:
        return [callbacks.OrbaxCheckpoint(str(folder / "orbax"))]
    except ImportError:  # Keras has the name even if Orbax is not installed
        return []


def test_the_progress_bar_is_printed_once(make_model, rows, capsys):
    """Also if the list has a `ProgbarLogger` already."""
    bar = [callbacks.ProgbarLogger()]
    keras_dist.dist_fit(make_model(), *rows, epochs=2, verbose=2, callbacks=bar)
    printed = capsys.readouterr().out.count("Epoch 1/2")
    assert keras_dist.gather(printed) == [1] + [0] * (keras_dist.size() - 1)


@pytest.mark.parametrize("update_freq", shortened(["epoch", 2], {2}))
def test_tensorboard_holds_the_scalars_of_the_whole_job(
    world, make_model, rows, folder, update_freq
):
    """Each once, with the throughput and the rate that updates use."""
    size = world.size
    x, y = (array[: 4 * 8 * size][:96] for array in rows)
    compiled = {"run_eagerly": False, "jit_compile": False}
    model = make_model(keras.optimizers.SGD(0.1), **compiled)
    board = callbacks.TensorBoard(str(folder), update_freq=update_freq)
    given = {"batch_size": 8, "epochs": 2, "validation_data": (x, y), "verbose": 0}
    given |= {"warmup_epochs": 1, "callbacks": [board]}
    history = keras_dist.dist_fit(model, x, y, **given).history
    steps = int(model.optimizer.iterations) // 2
    scalars = read_scalars(folder / "train")
    for name in ("loss", "accuracy", "rows_per_second", "effective_learning_rate"):
        values = dict(enumerate(history[name]))
        assert scalars[f"epoch_{name}"] == pytest.approx(values), name
    assert scalars["epoch_learning_rate"] == pytest.approx({0: 0.1, 1: 0.1})
    factors = [1 + (size - 1) * min(k / steps, 1) for k in range(2 * steps)]
    rates = [0.1 * factor for factor in factors]
    assert history["effective_learning_rate"] == pytest.approx(
        [rates[steps - 1], rates[-1]]
    )
    assert ("batch_loss" in scalars) == (update_freq != "epoch")
    validation = read_scalars(folder / "validation")
    expected = dict(enumerate(history["val_loss"]))
    assert validation["epoch_loss"] == pytest.approx(expected)


def read_scalars(folder):
    """Values of each tag by step; a step that is there twice is an error."""
    found = {}
    for path in folder.glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor)
                if number.dtype.kind == "f" and number.ndim == 0:
                    steps = found.setdefault(value.tag, {})
                    # Older versions of Keras write their own of all batches at step 0.
                    is_once = event.step not in steps
                    assert is_once or value.tag in ("batch_loss", "batch_accuracy")
                    steps[event.step] = float(number)
    return found
