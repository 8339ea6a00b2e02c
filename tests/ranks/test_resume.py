"""A training that was ended resumes at the same step, equal to the bit."""

import contextlib
import glob
import itertools
import os
import resource
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import raises_everywhere, shortened, warned
from resumable import (
    NUM_ROWS,
    Batches,
    Dies,
    Steady,
    as_cached,
    as_dataset,
    as_divided,
    as_files,
    as_filtered,
    as_own,
    as_shuffled,
    as_shuffled_unevenly,
    as_unseeded,
    make_model,
    rows_of_all,
    train,
    values_of,
)

import keras_dist

BATCH = 12


class Killed(BaseException):
    """Ends a fit at once, as a signal does; nothing of the package catches it."""


def die():
    """Ends a fit."""
    raise Killed


def is_same(one, other):
    """Whether two states have the same bits."""
    return all(
        (a == b).all() and a.dtype == b.dtype for a, b in zip(one, other, strict=True)
    )


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
def test_a_training_that_was_ended_resumes_to_the_bit(folder):
    """Also repeatedly; every row is read once; saving itself changes nothing."""
    steps = -(-NUM_ROWS // (BATCH * keras_dist.size()))
    expected_rows, rows = {}, {}
    # On one rank, without checkpoints, Keras shuffles by itself.
    whole = None if keras_dist.size() > 1 else f"{folder}/whole"
    sizes = {"batch_size": BATCH}
    expected, history = train(whole, saw=expected_rows.__setitem__, **sizes)
    assert history.epoch == [0, 1, 2]
    for seed, dies in enumerate((steps - 1, steps + 2, 3 * steps - 1)):
        options = {"seed": 100 + seed, "save_steps": 2, "die": die} | sizes
        with pytest.raises(Killed):
            train(f"{folder}/cut", saw=rows.__setitem__, dies=dies, **options)
    state, resumed = train(f"{folder}/cut", saw=rows.__setitem__, seed=77, **sizes)
    assert is_same(state, expected)
    assert resumed.epoch == [0, 1, 2] and values_of(resumed) == values_of(history)
    assert rows == expected_rows
    by_rank = keras_dist.gather(rows)
    for epoch in range(3):
        updates = range(epoch * steps, (epoch + 1) * steps)
        read = [row for own, n in itertools.product(by_rank, updates) for row in own[n]]
        assert len(set(read)) == len(read) > NUM_ROWS - keras_dist.size()
    rows.clear()  # finished: the same command makes no step, and returns the same
    state, again = train(f"{folder}/cut", saw=rows.__setitem__, seed=78, **sizes)
    count = len(make_model(3).weights)
    assert not rows and is_same(state[:count], expected[:count])
    assert again.epoch == [0, 1, 2] and values_of(again) == values_of(history)


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
@pytest.mark.parametrize("is_dataset", shortened([False, True], {True}))
def test_a_graph_resumes_in_the_middle_of_an_epoch_to_the_bit(folder, is_dataset):
    """Keras begins a step more at the end of it: no random number may be drawn then."""
    size = keras_dist.size()
    x = np.random.default_rng(0).normal(size=(16 * size, 5)).astype("float32")
    states = []
    for name, dies in (("whole", None), ("cut", 7), ("cut", None)):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", jit_compile=False)
        options = {"epochs": 3, "resume": f"{folder}/{name}", "save_steps": 2}
        options |= {"verbose": 0, "callbacks": [Dies(dies, die)]}
        data = x, x.sum(axis=1)
        if is_dataset:
            data = (tf.data.Dataset.from_tensor_slices(data).batch(4),)
        else:
            options["batch_size"] = 4
        ends = pytest.raises(Killed) if dies else contextlib.nullcontext()
        with ends:
            keras_dist.dist_fit(model, *data, **options)
        variables = [*model.variables, *model.optimizer.variables]
        states.append([keras.ops.convert_to_numpy(each) for each in variables])
    assert is_same(states[2], states[0])


@pytest.mark.parametrize(
    "as_data",
    shortened([as_dataset, as_shuffled, Batches], {as_shuffled}),
)
def test_data_in_batches_resumes_where_it_was(folder, as_data):
    """At a batch: none before it is read again, and none is left out."""
    options = {"as_data": as_data, "is_small": True, "epochs": 3}
    options["class_weight"] = {0: 1.0, 1: 2.0}
    expected_rows, rows = {}, {}
    expected, history = train(
        f"{folder}/whole", saw=expected_rows.__setitem__, **options
    )
    steps = len(expected_rows) // 3
    more = {"save_steps": 1, "die": die, "dies": steps + 3}
    with pytest.raises(Killed):
        train(f"{folder}/cut", saw=rows.__setitem__, **options, **more)
    rows_before = dict(rows)
    rows.clear()
    state, resumed = train(f"{folder}/cut", saw=rows.__setitem__, seed=77, **options)
    assert sorted(rows) == list(range(steps + 2, 3 * steps))
    assert is_same(state, expected) and values_of(resumed) == values_of(history)
    assert rows_before | rows == expected_rows


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
@pytest.mark.parametrize(
    "as_data", shortened([Steady, as_own, as_files, as_divided], {as_files, as_divided})
)
def test_an_epoch_of_data_without_a_position_begins_again(folder, as_data):
    """From the end of the epoch before, to the bit: `save_steps` saves none within."""
    options = {"as_data": as_data, "is_small": True, "save_steps": 1}
    options |= {"shard": "none"} if as_data is as_own else {}
    whole, cut = {}, {}
    expected, history = train(f"{folder}/whole", saw=whole.__setitem__, **options)
    steps = len(whole) // 3
    with pytest.raises(Killed):
        train(f"{folder}/cut", saw=cut.__setitem__, die=die, dies=steps + 3, **options)
    cut.clear()
    state, resumed = train(f"{folder}/cut", saw=cut.__setitem__, seed=77, **options)
    assert sorted(cut) == list(range(steps, 3 * steps))
    assert {update: whole[update] for update in cut} == cut
    assert is_same(state, expected) and values_of(resumed) == values_of(history)


@pytest.mark.parametrize(
    "as_data",
    shortened([as_shuffled_unevenly, as_filtered, as_cached], {as_shuffled_unevenly}),
)
def test_a_resume_does_not_change_the_order_of_passes(folder, as_data):
    """Checkpoints change nothing, also where one is that of the end of an epoch."""
    options = {"as_data": as_data, "is_small": True}
    plain, whole, cut = {}, {}, {}
    train(None, saw=plain.__setitem__, **options)
    train(f"{folder}/whole", saw=whole.__setitem__, **options)
    assert whole == plain
    ends = {"die": die, "dies": len(whole) // 3 + 1}
    with pytest.raises(Killed):
        train(f"{folder}/cut", saw=cut.__setitem__, **options, **ends)
    train(f"{folder}/cut", saw=cut.__setitem__, seed=77, **options)
    assert cut == whole


def small(folder, units=1, **options):
    """A quick fit, and the model."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse", run_eagerly=True)
    given = {"batch_size": 10, "verbose": 0, "epochs": 2, "resume": folder} | options
    x, y = rows_of_all()
    keras_dist.dist_fit(model, x / NUM_ROWS, y[:, None], **given)
    return model


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
def test_an_unusable_resume_is_an_error_on_all_ranks_before_training(folder):
    """A folder below a file, another model, damage, another callback that restores."""
    with open(f"{folder}/file", "w") as file:
        file.write("tea")
    with pytest.raises(RuntimeError, match=r"(?s)resume='.*file/below'.*writ"):
        small(f"{folder}/file/below")
    trained = small(f"{folder}/kept", epochs=1)
    with pytest.raises(ValueError, match=r"another model.*\(6, 2\) float32 instead"):
        small(f"{folder}/kept", units=2)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
    with pytest.raises(ValueError, match="BackupAndRestore"):
        small(f"{folder}/kept", callbacks=[backup])
    for wrong in ({"save_steps": 0}, {"save_seconds": -1}):
        with pytest.raises(ValueError, match=str(*wrong)):
            small(f"{folder}/kept", **wrong)
    again = small(f"{folder}/kept", epochs=1)  # the errors have changed nothing
    for one, other in zip(trained.weights, again.weights, strict=True):
        assert (one.numpy() == other.numpy()).all()
    if keras_dist.rank() == 0:
        for name in os.listdir(f"{folder}/kept"):
            os.truncate(f"{folder}/kept/{name}", 100)
    keras_dist.gather("cut short")
    with pytest.raises(ValueError, match="No checkpoint in the folder can be read"):
        small(f"{folder}/kept")


def test_the_plan_says_where_an_interrupted_epoch_goes_on(folder, capsys):
    """At a row, at a batch, or at its beginning, with the reason."""
    goes_on, begins = "goes on at the next", "begins again:"
    for number, (as_data, options, text) in enumerate(
        [
            (None, {}, f"{goes_on} row"),
            (as_shuffled, {}, f"{goes_on} batch"),
            (Steady, {}, f"{begins} its data has no known position"),
            (as_unseeded, {}, f"{begins} its data has no known position"),
            (
                Batches,
                {"steps_per_epoch": 4},
                f"{begins} `steps_per_epoch` with batches",
            ),
        ]
    ):
        if as_data is Steady and keras_dist.size() == 1:
            continue  # Keras does not take it
        options = options | {"is_small": True, "epochs": 1, "verbose": 2}
        saw = {}.__setitem__
        train(f"{folder}/{number}", saw=saw, as_data=as_data, **options)
        words = " ".join(capsys.readouterr().out.replace("│", "").split())
        is_said = f"resume an interrupted epoch {text} " in words
        assert is_said == (keras_dist.rank() == 0), words


def test_fewer_epochs_than_a_training_has_begun_are_an_error(folder):
    """It is not finished: the state is that of the middle of an epoch."""
    steps = -(-NUM_ROWS // (10 * keras_dist.size()))
    with pytest.raises(Killed):
        small(folder, save_steps=1, callbacks=[Dies(steps + 2, die)])
    with pytest.raises(ValueError, match=r"middle of epoch 2.*epochs=1.*at least 2"):
        small(folder, epochs=1)


@pytest.mark.several_ranks
def test_a_finished_training_is_restored_where_one_rank_has_built_its_model(folder):
    """The ranks make the same collectives, and have the same weights."""
    weights = []
    for seed in (3, 4):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.layers.Dense(1)])
        if keras_dist.rank() == 0:
            model.build((None, 6))
        model.compile("sgd", "mse", run_eagerly=True)
        x, y = rows_of_all()
        keras_dist.dist_fit(model, x / NUM_ROWS, y[:, None], verbose=0, resume=folder)
        weights.append(model.get_weights())
    assert is_same(*weights)


@pytest.mark.several_ranks
def test_a_state_that_one_rank_cannot_give_is_an_error_on_all(folder):
    """Nobody waits for its checkpoint."""

    class Fails(keras.callbacks.Callback):
        def state_dict(self):
            return {"lock": print if keras_dist.rank() else 0}

        def load_state_dict(self, state):
            pass

    for message in raises_everywhere(
        TypeError, lambda: small(folder, callbacks=[Fails()])
    ):
        assert "can be saved in a checkpoint" in message


@pytest.mark.several_ranks
def test_another_folder_on_a_rank_is_an_error(folder):
    """Otherwise the ranks would resume at different steps."""
    with pytest.raises(ValueError, match="disagree on `resume`"):
        small(f"{folder}/{keras_dist.rank()}")


@pytest.mark.several_ranks
def test_a_folder_of_each_rank_is_an_error_on_all(folder, monkeypatch):
    """As on hosts without a common disk: before training, and no file is left."""
    own = f"{folder}/{keras_dist.rank()}"
    os.mkdir(own)
    monkeypatch.chdir(own)
    rank, size = keras_dist.rank(), keras_dist.size()
    for message in raises_everywhere(RuntimeError, lambda: small("kept")):
        assert "must be one that all hosts share" in message
        assert f"is not seen by {size - 1} of {size} ranks" in message
    left = os.listdir("kept") if rank == 0 else os.listdir()
    assert left == [".checkpoint.lock"] * (rank == 0)


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(folder):
    """With a warning on the first rank; training resumes from the older one."""
    whole = small(f"{folder}/whole", epochs=3)
    small(f"{folder}/cut", epochs=2)
    if keras_dist.rank() == 0:
        newest = max(os.listdir(f"{folder}/cut"))
        os.truncate(f"{folder}/cut/{newest}", 1000)
    keras_dist.gather("cut short")
    with warned("damaged") as messages:
        again = small(f"{folder}/cut", epochs=3)
    assert len(messages) == (keras_dist.rank() == 0)
    for one, other in zip(whole.weights, again.weights, strict=True):
        assert (one.numpy() == other.numpy()).all()


class Fills(keras.callbacks.Callback):
    """From the second epoch on, the disk is full: no file may grow.

    Args:
        folder: In which the first epoch is saved before.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch, logs=None):
        while epoch == 1 and not glob.glob(f"{self.folder}/checkpoint-*"):
            time.sleep(0.01)
        limit = 4096 if epoch == 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_is_a_warning_and_costs_no_checkpoint(folder):
    """Training continues; the checkpoint before remains, and its room is used again."""
    with warned("File too large") as messages:
        small(f"{folder}/kept", epochs=2, callbacks=[Fills(f"{folder}/kept")])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert len(messages) == (keras_dist.rank() == 0)
    keras_dist.gather("the first rank has given the folder back")
    assert len(glob.glob(f"{folder}/kept/*")) == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(RuntimeError, match="File too large"):
            small(f"{folder}/none")  # before it trains
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert os.listdir(f"{folder}/none") == [".checkpoint.lock"]


@pytest.mark.several_ranks
def test_data_shuffled_by_other_seeds_is_not_resumed_in_an_epoch(folder):
    """Rows would come twice, and others not at all."""

    def shuffled(seed):
        tf.random.set_seed(seed)
        x, y = rows_of_all()
        data = tf.data.Dataset.from_tensor_slices((x / NUM_ROWS, y))
        data = data if seed is None else data.shuffle(NUM_ROWS, seed=1)
        return data.batch(5, drop_remainder=True)

    def fit(seed, *callbacks):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        options = {"resume": folder, "save_steps": 1, "verbose": 0}
        keras_dist.dist_fit(model, shuffled(seed), callbacks=callbacks, **options)

    with pytest.raises(Killed):
        fit(1, Dies(3, die))
    with pytest.raises(ValueError, match=r"rows would come twice.*\(2, 1\).*\(1, 1\)"):
        fit(2)
    with pytest.raises(ValueError, match=r"come twice.*none, and \[\(1, 1\)"):
        fit(None)
