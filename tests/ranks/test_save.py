"""A model that all ranks save is there once, whole, and loads in plain Keras."""

import fcntl
import json
import os
import socket
import threading
import time
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_close,
    assert_same_bits,
    gather_errors,
    raises_everywhere,
    shortened,
    slow_on_three,
)
from harness.launching import allow
from keras.saving import save_model  # before keras_dist, as most scripts have it

import keras_dist
from keras_dist.training import saving

pytestmark = pytest.mark.several_ranks
TIMES = 5


@pytest.fixture(scope="module")
def model():
    """A model of 2 MB that was trained by all ranks."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(512)])
    model.add(keras.layers.Dense(512, name="encoded"))
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 5), "float32")
    keras_dist.dist_fit(model, x, x[:, :1], batch_size=8, epochs=1, verbose=0)
    return model


@pytest.fixture(params=["announced", "without a store"])
def store(request, monkeypatch):
    """With the launcher's store, and as under `mpirun`, which has none."""
    if request.param == "without a store":
        monkeypatch.setattr(saving._logs[0], "_store", None)
    return request.param


def met():
    """All ranks are here; they then go on within a millisecond or so."""
    keras_dist.gather(0)


def save_unzipped(model, path):
    """A folder in place of a `.keras` file."""
    model.save(path, zipped=False)


def sharded(model, path):
    """Weights in many files."""
    model.save_weights(path, max_shard_size=0.001)


def archive(model, path):
    """Keras's own way to export a part of a model."""
    made = keras.export.ExportArchive()
    made.track(model)
    made.add_endpoint("serve", model.call, [tf.TensorSpec((None, 5))])
    made.write_out(path, verbose=False)


def load_model(path, model):
    """Weights as they are in plain Keras."""
    return keras.models.load_model(path, compile=False).get_weights()


def load_weights(path, model):
    """Weights read into another model."""
    twin = keras.models.clone_model(model)
    twin.load_weights(path)
    return twin.get_weights()


def serve(path, model):
    """What a SavedModel answers, in place of its weights."""
    loaded = tf.saved_model.load(path)
    return [loaded.serve(tf.ones((1, 5))).numpy()]


KINDS = {
    "keras": (lambda m, p: m.save(p), "m{}.keras", load_model, TIMES),
    "h5": (lambda m, p: m.save(p), "m{}.h5", load_model, TIMES),
    "weights": (
        lambda m, p: m.save_weights(p, overwrite=False),
        "m{}.weights.h5",
        load_weights,
        TIMES,
    ),
    "save_model": (save_model, "f{}.keras", load_model, 3),
    "by keras.saving": (
        lambda m, p: keras.saving.save_model(model=m, filepath=p, overwrite=False),
        "s{}.keras",
        load_model,
        3,
    ),
    "unzipped": (save_unzipped, "u{}", load_model, 2),
    "sharded": (sharded, "m{}.weights.json", load_weights, 2),
    "export": (lambda m, p: m.export(p, verbose=False), "e{}", serve, 2),
    "archive": (archive, "a{}", serve, 2),
}


@pytest.mark.parametrize(
    "kind", shortened(KINDS, {"save_model", "weights", "unzipped", "export"})
)
def test_what_all_ranks_save_at_once_is_whole(model, folder, store, kind):
    """Each time, for every function that saves, and on every rank when it returns.

    What a killed process has left of a save before is gone, too.
    """
    save, name, load, times = KINDS[kind]
    expected = model.get_weights() if load is not serve else [model(np.ones((1, 5)))]

    def save_and_load(path):
        save(model, path)
        assert_close(load(path, model), expected, 1e-6 if load is serve else 0)

    if load is not serve:  # exports have no folder of their own
        left = folder / f".keras_dist.{socket.gethostname()}.leftover"
        left.mkdir(exist_ok=True)
    for number in range(times):
        path = str(folder / name.format(number))
        met()
        errors = gather_errors(Exception, partial(save_and_load, path))
        assert errors == [None] * keras_dist.size()
    left = [path for path in folder.rglob(".keras_dist*") if path.exists()]
    assert keras_dist.gather(left) == [[]] * keras_dist.size()


@pytest.mark.three_ranks
def test_the_first_rank_alone_writes(model, folder, monkeypatch):
    """Once, however late it comes; a second save of the same path is another one.

    While the disk is slow, nobody waits for the folder's lock.
    """
    written, synced = [], []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *a: (written.append(a), replace(*a)))

    def sync(_):
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        synced.append(len(written))

    monkeypatch.setattr(os, "fsync", sync)
    for late in (0, keras_dist.size() - 1):
        met()
        if keras_dist.rank() == late:
            time.sleep(0.5)
        model.save(folder / "m.keras")
        model.layers[0].bias.assign_add(np.ones(512))
        loaded = keras.models.load_model(folder / "m.keras")
        np.testing.assert_array_equal(
            loaded.layers[0].bias + 1, model.layers[0].bias.numpy()
        )
        met()
    assert keras_dist.gather(len(written)) == [2] + [0] * (keras_dist.size() - 1)
    assert synced == list(range(len(written)))


class Noted(keras.layers.Dense):
    """Calls what it is given while it is saved, each once."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.calls:
            self.calls.pop(0)()


def test_another_save_of_the_same_path_damages_none(folder, store):
    """As of another job with the same ranks, that begins and ends a while later."""
    path = str(folder / f"{keras_dist.rank()}.weights.h5")
    layer = Noted(1)
    model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
    other = threading.Thread(target=model.save_weights, args=[path])
    is_half, is_loaded = threading.Event(), threading.Event()

    def wait_for_other():
        other.start()
        assert is_half.wait(30)

    def wait_for_load():
        is_half.set()
        assert is_loaded.wait(30)

    object.__setattr__(layer, "calls", [wait_for_other, wait_for_load])
    met()
    load = partial(load_weights, path, model)

    def save_and_load():
        try:
            model.save_weights(path)
            load()
        finally:
            is_loaded.set()

    errors = gather_errors(Exception, save_and_load)
    other.join()
    errors += gather_errors(Exception, load)
    assert errors == [None] * 2 * keras_dist.size()


@slow_on_three
def test_a_path_of_each_rank_is_written_by_it(model, folder, store, monkeypatch):
    """And nobody waits for a save that the first rank does not make."""
    monkeypatch.setattr(saving, "_BEGIN_SECONDS", 2.0)
    rank, size = keras_dist.rank(), keras_dist.size()
    start = time.monotonic()
    for number in range(4):
        model.save(folder / f"{rank}.{number}.keras")
    if rank == size - 1:
        model.save_weights(folder / "last.weights.h5")  # waits a while, then writes
    seconds = time.monotonic() - start
    met()
    names = {f"{r}.{n}.keras" for r in range(size) for n in range(4)}
    assert {path.name for path in folder.iterdir()} == names | {"last.weights.h5"}
    for name in names:
        keras.models.load_model(folder / name)
    assert max(keras_dist.gather(seconds)) < allow(20)


def test_a_guarded_save_is_not_waited_for(model, folder):
    """`if rank == 0` at any place, then one of all ranks: they find the newest."""
    encoder = keras.Sequential([model.layers[0]])  # has no optimizer, and no updates
    encoder.build((None, 5))
    x = np.ones((8, 5), "float32")
    for _ in range(2):
        if keras_dist.rank() == 0:
            model.save(folder / "m.keras")
            encoder.save(folder / "encoder.keras")
        keras_dist.dist_fit(model, x, x[:, :1], batch_size=8, epochs=1, verbose=0)
        if keras_dist.rank() == 0:
            time.sleep(0.3)
        encoder.save(folder / "encoder.keras")
        model.save(folder / "m.keras")
        for saved, name in ((encoder, "encoder.keras"), (model, "m.keras")):
            loaded = load_model(str(folder / name), saved)
            assert_same_bits(saved.get_weights(), loaded)
        met()


def test_an_error_is_each_ranks_own(model, folder):
    """No rank waits for a file that the first one could not write."""
    if keras_dist.rank() == 0:
        (folder / "file").write_text("no folder")
    met()
    for arguments, text in (
        ([folder / "m.txt"], "Invalid filepath extension"),
        ([folder / "file" / "m.keras"], ""),
        ([], "filepath"),
    ):
        raises_everywhere(Exception, partial(model.save, *arguments), text)


def test_what_else_is_in_a_folder_stays(model, folder, store):
    """An export into a folder that has files of the user's."""
    if keras_dist.rank() == 0:
        (folder / "out").mkdir()
        (folder / "out" / "README").write_text("tea")
    met()
    model.export(folder / "out", verbose=False)
    met()
    assert (folder / "out" / "README").read_text() == "tea"
    assert serve(str(folder / "out"), model)


@pytest.mark.three_ranks
def test_a_block_of_the_first_rank(folder):
    """It is done on the first rank before any other goes on; others may do it after."""
    path = folder / "array.npy"
    with keras_dist.first_rank() as is_first:
        assert is_first == (keras_dist.rank() == 0)
        if is_first:
            time.sleep(0.3)
            np.save(path, np.arange(5))
    np.testing.assert_array_equal(np.load(path), np.arange(5))
    met()
    began = time.time()
    with keras_dist.first_rank():
        before = time.time()
        time.sleep(0.2 if keras_dist.rank() == 0 else 0)
        (folder / "config.json").write_text(json.dumps({"a": 1}))
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    assert (before - began > 0.1) == (keras_dist.rank() > 0)
    met()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_block_is_raised_on_all_ranks(failing):
    """Its own where it was raised, and one that names that rank on the others."""
    with pytest.raises((KeyError, RuntimeError)) as caught:  # noqa: SIM117
        with keras_dist.first_rank():
            if keras_dist.rank() == failing:
                raise KeyError("tea")
    is_own = isinstance(caught.value, KeyError)
    assert is_own == (keras_dist.rank() == failing)
    assert "tea" in str(caught.value)
    assert is_own or f"On rank {failing}: KeyError" in str(caught.value)


def test_a_collective_in_a_block_is_an_error():
    """Otherwise the ranks would wait for each other."""
    with (
        pytest.raises(RuntimeError, match="no collective can be in it"),
        keras_dist.first_rank(),
    ):
        keras_dist.gather(1)
