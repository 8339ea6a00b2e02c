"""A training that was ended resumes at the same step, equal to the bit."""

import functools
import glob
import itertools
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    Ended,
    assert_same_bits,
    distribute_jobs,
    raises_everywhere,
    shortened,
    slow_on_three,
    warned,
)
from harness.models import make_compiled, vectors
from harness.resumable import (
    KINDS,
    NUM_ROWS,
    Dies,
    make_model,
    rows_of_all,
    state_of,
    train,
    values_of,
)

import keras_dist

BATCH = 12


def die():
    """Ends a fit."""
    raise Ended


def train_and_note(folder, **options):
    """Train; the rows of this rank in each update, and what must come out the same."""
    rows = {}
    state, history = train(folder, saw=rows.__setitem__, **options)
    return rows, state, values_of(history)


def assert_same_result(found, expected):
    """The same bits and logs, whichever rows were read."""
    assert_same_bits(found[1], expected[1])
    assert found[2] == expected[2]


def end_and_resume(folder, steps, *, saved=(), **options):
    """Train in one go, and again until so many steps of the second epoch, and resume.

    Args:
        folder: Of the checkpoints.
        steps: After which the second training ends.
        saved: Options of that training alone.
        **options: Of all three.

    Returns:
        Of the first and the last training what `train_and_note` returns; and the rows
        of the one that was ended.
    """
    whole, rows = train_and_note(f"{folder}/whole", **options), {}
    ends = {"die": die, "dies": len(whole[0]) // 3 + steps, **dict(saved)}
    with pytest.raises(Ended):
        train(f"{folder}/cut", saw=rows.__setitem__, **options, **ends)
    return whole, train_and_note(f"{folder}/cut", seed=77, **options), rows


@slow_on_three
def test_a_training_that_was_ended_resumes_to_the_bit(folder):
    """Also repeatedly; every row is read once; saving itself changes nothing."""
    steps = -(-NUM_ROWS // (BATCH * keras_dist.size()))
    rows, sizes = {}, {"batch_size": BATCH}
    # On one rank, without checkpoints, Keras shuffles by itself.
    whole = None if keras_dist.size() > 1 else f"{folder}/whole"
    expected = train_and_note(whole, **sizes)
    for seed, dies in enumerate((steps - 1, steps + 2, 3 * steps - 1)):
        options = {"seed": 100 + seed, "save_steps": 2, "die": die} | sizes
        with pytest.raises(Ended):
            train(f"{folder}/cut", saw=rows.__setitem__, dies=dies, **options)
    state, resumed = train(f"{folder}/cut", saw=rows.__setitem__, seed=77, **sizes)
    assert_same_result((rows, state, values_of(resumed)), expected)
    assert resumed.epoch == [0, 1, 2]
    assert rows == expected[0]
    by_rank = keras_dist.gather(rows)
    for epoch in range(3):
        updates = range(epoch * steps, (epoch + 1) * steps)
        read = [row for own, n in itertools.product(by_rank, updates) for row in own[n]]
        assert len(set(read)) == len(read) > NUM_ROWS - keras_dist.size()
    # Finished: the same command makes no step, and returns the same.
    state, again = train(f"{folder}/cut", saw=pytest.fail, seed=78, **sizes)
    count = len(make_model(3).weights)
    assert_same_bits(state[:count], expected[1][:count])
    assert again.epoch == [0, 1, 2] and values_of(again) == expected[2]


class Wobbles(keras.layers.Layer):
    """Draws by a function without a seed, also in epochs that are resumed."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


@slow_on_three
@pytest.mark.parametrize("is_dataset", shortened([False, True], {True}))
def test_a_graph_resumes_in_the_middle_of_an_epoch_to_the_bit(folder, is_dataset):
    """Keras begins a step more at the end of it: no random number may be drawn then."""
    x = np.random.default_rng(0).normal(size=(16 * keras_dist.size(), 5))
    data, how = (x, x.sum(axis=1)), {"batch_size": 4}
    if is_dataset:
        data, how = (tf.data.Dataset.from_tensor_slices(data).batch(4),), {}

    def dropping():
        drops = [keras.layers.Dropout(0.5), Wobbles()]
        return keras.Sequential([keras.layers.Dense(8), *drops, keras.layers.Dense(1)])

    def run(name, *ends):
        model = make_compiled(dropping, "adam", "mse", jit_compile=False)
        options = {"resume": f"{folder}/{name}", "save_steps": 2, "callbacks": [*ends]}
        keras_dist.dist_fit(model, *data, epochs=3, verbose=0, **options, **how)
        return state_of(model, is_equivalent=False)

    whole = run("whole")
    with pytest.raises(Ended):
        run("cut", Dies(7, die))
    assert_same_bits(run("cut"), whole)


class Changes(keras.callbacks.Callback):
    """Changes a weight, the rate and its numbers where epochs and steps begin."""

    def __init__(self):
        super().__init__()
        self.numbers, self.rate, self.steps = [1.0], 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.rate = float(self.model.optimizer.learning_rate)
        self.numbers.append(self.numbers[-1] / 2)
        for bias in self.model.trainable_variables[1:]:
            bias.assign_add([self.numbers[-1]])

    def on_train_batch_begin(self, batch, logs=None):
        # Keras begins one step more in an epoch that is resumed.
        self.model.optimizer.learning_rate = self.rate * (1 + self.steps / 100)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = self.rate


# Data, whether the model has an `Input`, and whether the end of an epoch is resumed.
BEGINNINGS = [
    (None, True, True),
    (None, False, True),
    (None, False, False),
    ("filtered", True, True),
    ("shuffled", True, False),
    ("shuffled", False, True),
    ("shuffled", False, False),
    ("sequence", False, True),
    ("sequence", False, False),
]


@slow_on_three
@pytest.mark.parametrize(
    ("as_data", "has_input", "is_end"),
    shortened(BEGINNINGS, {BEGINNINGS[0]}),
)
def test_what_callbacks_set_at_beginnings_is_as_without_an_end(
    folder, as_data, has_input, is_end
):
    """The rate of an epoch, weights that are swapped, numbers of the callback's own.

    Only the rate of a model that the first batch builds.
    """
    x, y = rows_of_all()

    def make():
        first = [keras.Input((6,))] * has_input
        return keras.Sequential([*first, keras.layers.Dense(1)])

    def run(name, *ends, seed=3, **options):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        model = make_compiled(make, optimizer, "mse", seed=seed, metrics=["mae"])
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.7 * rate),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            changes := Changes(),
        ]
        callbacks = callbacks[: 1 if as_data == "sequence" else None]
        options |= {"resume": f"{folder}/{name}", "callbacks": [*callbacks, *ends]}
        data = {"x": x / NUM_ROWS, "y": y, "batch_size": 6}
        if as_data is not None:
            data = {"x": KINDS[as_data](x / NUM_ROWS, y)}
        options |= {"epochs": 3, "verbose": 0, "lr_scaling": "none"}
        keras_dist.dist_fit(model, **data, **options)
        numbers = changes.numbers, int(model.optimizer.iterations)
        return state_of(model, is_equivalent=False), numbers

    whole = run("whole")
    with pytest.raises(Ended):
        ends = Dies(whole[1][1] // 3 + 3, die)
        run("cut", ends, save_steps=None if is_end else 1)
    state, numbers = run("cut", seed=77)
    assert_same_bits(state, whole[0])
    assert numbers == whole[1]


SAVES, LATER = {"save_steps": 1}, {"initial_epoch": 1, "epochs": 4}
WEIGHS = {"class_weight": {0: 1.0, 1: 2.0}}

# Data; after how many steps of its second epoch a training ends, how many of them are
# not made again, and options of that training and of all.
RESUMED = [
    *((each, 3, 2, SAVES, WEIGHS) for each in ("shuffled", "data set", "sequence")),
    # Without a position an epoch begins again: `save_steps` saves none within.
    *((each, 3, 0, {}, SAVES) for each in ("divided", "steady", "files")),
    ("rows of a rank", 3, 0, {}, SAVES | {"shard": "none"}),
    # Shuffled for each pass: a checkpoint at the end of an epoch changes no order. The
    # first pass is that of the first epoch of this training, whatever its number.
    *((each, 1, 0, {}, LATER) for each in ("shuffled unevenly", "filtered", "cached")),
]


@slow_on_three
@pytest.mark.parametrize(
    ("as_data", "ended", "kept", "saved", "options"),
    shortened(RESUMED, [RESUMED[0], RESUMED[2], RESUMED[7]]),
)
def test_data_in_batches_resumes_where_it_was(
    folder, as_data, ended, kept, saved, options
):
    """At a batch, or at the end of an epoch: none is read again, and none left out."""
    if as_data == "divided" and keras_dist.size() == 1:
        pytest.skip("one rank divides nothing")
    options = {"as_data": as_data, "is_small": True} | options
    whole, resumed, before = end_and_resume(folder, ended, saved=saved, **options)
    steps = len(whole[0]) // 3
    assert sorted(resumed[0]) == list(range(steps + kept, 3 * steps))
    assert before | resumed[0] == whole[0]
    assert_same_result(resumed, whole)
    if "initial_epoch" in options:
        assert train_and_note(None, **options)[0] == whole[0]


def small(folder, units=1, **options):
    """A quick fit, and the model."""

    def make():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])

    model = make_compiled(make, "sgd", "mse", run_eagerly=True)
    given = {"batch_size": 10, "verbose": 0, "epochs": 2, "resume": folder} | options
    x, y = rows_of_all()
    keras_dist.dist_fit(model, x / NUM_ROWS, y[:, None], **given)
    return model


@slow_on_three
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
    assert_same_bits(trained.get_weights(), again.get_weights())
    if keras_dist.rank() == 0:
        for name in os.listdir(f"{folder}/kept"):
            os.truncate(f"{folder}/kept/{name}", 100)
    keras_dist.gather("cut short")
    with pytest.raises(ValueError, match="No checkpoint in the folder can be read"):
        small(f"{folder}/kept")


def test_the_plan_says_where_an_interrupted_epoch_continues(folder, capsys):
    """At a row, at a batch, or at its beginning, with the reason."""
    continues, begins = "continues at the next", "starts again:"
    for number, (as_data, options, text) in enumerate(
        [
            (None, {}, f"{continues} row"),
            ("shuffled", {}, f"{continues} batch"),
            ("steady", {}, f"{begins} its data has no known position"),
            ("unseeded", {}, f"{begins} its data has no known position"),
            (
                "sequence",
                {"steps_per_epoch": 4},
                f"{begins} `steps_per_epoch` with batches",
            ),
        ]
    ):
        if as_data == "steady" and keras_dist.size() == 1:
            continue  # Keras does not take it
        options = options | {"is_small": True, "epochs": 1, "verbose": 2}
        saw = {}.__setitem__
        train(f"{folder}/{number}", saw=saw, as_data=as_data, **options)
        words = " ".join(capsys.readouterr().out.replace("│", "").split())
        is_said = f"resume an interrupted epoch {text} " in words
        assert is_said == (keras_dist.rank() == 0), words


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize(
    ("as_data", "text"),
    [(None, "resumes from {folder}"), ("files", "begins epoch {epoch} again")],
)
def test_after_sigterm_it_says_where_the_same_command_continues(
    folder, capsys, as_data, text, epoch
):
    """With code 75; of data without a position, the epoch has not been saved."""

    def ask():
        if keras_dist.rank() == keras_dist.size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    options = {"as_data": as_data, "is_small": True, "saw": {}.__setitem__}
    steps = 18 // keras_dist.size()
    try:
        with pytest.raises(SystemExit) as ended:
            train(folder, die=ask, dies=1 + (epoch - 1) * steps, **options)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75
    said = f"received SIGTERM in epoch {epoch}; the same command {text} "
    out = " ".join(capsys.readouterr().out.split()) + " "
    expected = said.format(folder=folder, epoch=epoch)
    assert (expected in out) == (keras_dist.rank() == 0), out


@pytest.mark.parametrize("as_data", ["sequence", "seeded"])
def test_saving_changes_no_training(folder, as_data):
    """By a clock that is always due, at the last step of an epoch, too."""
    x, y = vectors(48)
    found = []
    for options in ({}, {"resume": folder, "save_seconds": 1e-4}):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.3), "mse")
        data = Reordered(x, y)
        if as_data == "seeded":
            data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=3)
            data = data.batch(12)
        keras_dist.dist_fit(
            model,
            data,
            epochs=3,
            batch="global",
            verbose=0,
            **options,
        )
        found.append(model.get_weights())
    assert_same_bits(*found)


class Reordered(keras.utils.PyDataset):
    """Batches whose rows `on_epoch_end` puts in another order."""

    def __init__(self, x, y):
        super().__init__()
        self.rows, self.ends = (x, y), 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return tuple(part[index * 12 :][:12] for part in self.rows)

    def on_epoch_end(self):
        self.ends += 1
        order = np.random.RandomState(self.ends).permutation(48)
        self.rows = tuple(part[order] for part in self.rows)


# The hook in which SIGTERM comes, and at which call of it, with so many steps an epoch.
MOMENTS = {
    "first step": ("on_train_batch_begin", lambda steps: 1),
    "middle of an epoch": ("on_train_batch_end", lambda steps: steps + 1),
    "last step": ("on_train_batch_end", lambda steps: 2 * steps),
    "between epochs": ("on_epoch_begin", lambda steps: 2),
    "validation": ("on_test_batch_begin", lambda steps: 1),
    "last validation": ("on_test_end", lambda steps: 2),
    "callback": ("on_epoch_end", lambda steps: 1),
    "end of the training": ("on_train_end", lambda steps: 1),
    "write": ("on_train_batch_begin", lambda steps: steps + 1),
    "full disk": ("on_test_end", lambda steps: 2),
}
QUICK = {"first step", "last step", "last validation", "end of the training"}


class Terminates(keras.callbacks.Callback):
    """Sends SIGTERM to the last rank at a call of a hook."""

    def __init__(self, hook, number):
        super().__init__()
        self.number = number
        setattr(self, hook, self.count)

    def count(self, *args, **kwargs):
        """The call."""
        self.number -= 1
        if self.number == 0 and keras_dist.rank() == keras_dist.size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@functools.cache
def train_without_an_end():
    """The weights after a training that nothing ends."""
    x, y = rows_of_all()
    held_out = x[:20] / NUM_ROWS, y[:20, None]
    return small(None, validation_data=held_out, shuffle=False).get_weights()


@pytest.mark.parametrize("moment", shortened([*MOMENTS], {*QUICK, "full disk"}))
def test_sigterm_at_any_moment_ends_the_job_with_a_code_that_is_true(
    folder, capsys, limit_files, monkeypatch, moment
):
    """75 if there is a checkpoint; 74 if it could not be written, with the one before.

    A script that goes on after the fit would train what comes next until it is killed.
    The same command then gives the weights of a training that nothing has ended.
    """

    def fill(epoch, logs):
        while epoch and keras_dist.rank() == 0 and not glob.glob(f"{folder}/c*-*"):
            time.sleep(0.01)  # the first epoch is saved before
        if epoch:
            limit_files(4096)

    if moment == "write":
        monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.1))
    hook, find_number = MOMENTS[moment]
    x, y = rows_of_all()
    held_out = x[:20] / NUM_ROWS, y[:20, None]
    options = {"validation_data": held_out, "shuffle": False}
    ends = [Terminates(hook, find_number(-(-NUM_ROWS // (10 * keras_dist.size()))))]
    is_full = moment == "full disk"
    if is_full:
        ends.append(keras.callbacks.LambdaCallback(on_epoch_begin=fill))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            small(folder, callbacks=ends, **options)
    finally:
        limit_files()
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == (74 if is_full else 75)
    words = " ".join(capsys.readouterr().out.split())
    keras_dist.gather("all have ended")
    path = f"{folder}/checkpoint-00000001" if is_full else folder
    assert (f"resumes from {path}" in words) == (keras_dist.rank() == 0), words
    assert ("could not be written" in words) == (is_full and keras_dist.rank() == 0)
    again = small(folder, **options).get_weights()
    assert_same_bits(again, train_without_an_end())


def test_a_url_is_no_folder(folder):
    """It would be a folder `gs:` of the working directory, of one host."""
    with pytest.raises(ValueError, match="not a URL.*gs://bucket/run"):
        small("gs://bucket/run")
    assert not os.path.exists("gs:")


def test_fewer_epochs_than_a_training_has_begun_are_an_error(folder):
    """It is not finished: the state is that of the middle of an epoch."""
    steps = -(-NUM_ROWS // (10 * keras_dist.size()))
    with pytest.raises(Ended):
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
    assert_same_bits(*weights)


class Scores(keras.callbacks.Callback):
    """Logs a score that is best after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = [0.1, 0.9, 0.8, 0.7][epoch]


@pytest.mark.parametrize("first", shortened(["same", "another"], {"another"}))
def test_a_restart_keeps_what_earlier_fits_of_a_callback_have_found(folder, first):
    """Fits with one callback object, in one folder or not; their patience is new."""

    def make_best(name):
        given = {"save_best_only": True, "save_weights_only": True, "mode": "min"}
        path = f"{folder}/{name}.weights.h5"
        return keras.callbacks.ModelCheckpoint(path, "score", **given)

    def fit_plainly():
        best, model = make_best("plain"), keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        x = np.ones((2, 2))
        model.fit(x, x[:, :1], epochs=4, verbose=0, callbacks=[Scores(), best])
        return best.best

    def train(*fits):
        """Train in a new process; return the best score, and its file."""
        best, stops = make_best("best"), keras.callbacks.EarlyStopping("loss")
        for epochs, name in fits:
            stops.patience = given = next(patience)
            callbacks = [Scores(), best, stops]
            small(f"{folder}/{name}", epochs=epochs, callbacks=callbacks)
            assert stops.patience == given
        with open(best.filepath, "rb") as file:
            return keras_dist.broadcast(best.best), file.read()

    patience = itertools.count(10)
    [expected] = distribute_jobs([fit_plainly])
    whole = train((1, first), (2, "same"))
    assert whole[0] == expected
    assert train((2, "same"), (3, "same")) == whole
    assert train((4, "same")) == whole


@pytest.mark.several_ranks
def test_a_state_that_one_rank_cannot_give_is_an_error_on_all(folder):
    """Nobody waits for its checkpoint."""

    class Fails(keras.callbacks.Callback):
        def state_dict(self):
            return {"lock": print if keras_dist.rank() else 0}

        def load_state_dict(self, state):
            pass

    text = "can be saved in a checkpoint"
    raises_everywhere(TypeError, lambda: small(folder, callbacks=[Fails()]), text)


@pytest.mark.several_ranks
def test_the_last_checkpoint_is_there_on_every_rank(folder, monkeypatch):
    """A fit ends when it is written, also on ranks that do not write it."""
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(0.2))
    small(folder, epochs=1)
    assert os.path.exists(f"{folder}/checkpoint-00000001.keras_dist")


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
    texts = ["must be one that all hosts share"]
    texts += [f"is not seen by {size - 1} of {size} ranks"]
    raises_everywhere(RuntimeError, lambda: small("kept"), *texts)
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
    assert_same_bits(whole.get_weights(), again.get_weights())


def test_a_full_disk_is_a_warning_and_costs_no_checkpoint(folder, limit_files):
    """Training continues; the checkpoint before remains, and its room is used again."""

    def fill(epoch, logs):
        if epoch == 1:
            while not glob.glob(f"{folder}/kept/checkpoint-*"):
                time.sleep(0.01)  # the first epoch is saved before
            limit_files(4096)

    fills = keras.callbacks.LambdaCallback(on_epoch_begin=fill)
    with warned("File too large") as messages:
        small(f"{folder}/kept", epochs=2, callbacks=[fills])
    limit_files()
    assert len(messages) == (keras_dist.rank() == 0)
    keras_dist.gather("the first rank has given the folder back")
    assert len(glob.glob(f"{folder}/kept/*")) == 1
    limit_files(1000)
    with pytest.raises(RuntimeError, match="File too large"):
        small(f"{folder}/none")  # before it trains
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

    with pytest.raises(Ended):
        fit(1, Dies(3, die))
    with pytest.raises(ValueError, match=r"rows would come twice.*\(2, 1\).*\(1, 1\)"):
        fit(2)
    with pytest.raises(ValueError, match=r"come twice.*none, and \[\(1, 1\)"):
        fit(None)
