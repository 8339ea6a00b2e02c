"""With `shard_optimizer` the state is divided, and what leaves the fit is whole.

Training itself is compared in `test_cases.py`.
"""

import contextlib
import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import several
from claims import (
    assert_equal_to_the_bit,
    difference_of_states,
    shortened,
    state_of,
)

import keras_dist
from keras_dist import comm
from keras_dist.optimizer import sharded_state

pytestmark = pytest.mark.several_ranks
EPOCHS = 2


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """Of this small model the first kernel is large, and the others are not whole."""
    monkeypatch.setattr(sharded_state, "_SMALL", 12)


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks."""
    return Path(keras_dist.broadcast(str(tmp_path)))


def adam():
    return keras.optimizers.Adam(0.01)


@pytest.fixture
def train(rows, make_model):
    """Train a model, new or given, with Adam whose state is divided."""

    def fit(model=None, epochs=EPOCHS, callbacks=(), **options):
        if model is None:
            model = make_model(adam(), jit_compile=False)
        given = {"batch": "global", "batch_size": 16, "shuffle": False, "verbose": 0}
        given |= {"shard_optimizer": True, "callbacks": list(callbacks)} | options
        keras_dist.dist_fit(model, *rows, epochs=epochs, **given)
        return model

    return fit


@pytest.fixture
def expected(rows, make_model):
    """The state of one process after fits of so many epochs."""

    def states(*fits):
        model = make_model(adam(), jit_compile=False)
        for epochs in fits or [EPOCHS]:
            model.fit(*rows, batch_size=16, shuffle=False, epochs=epochs, verbose=0)
        return state_of(model)

    return states


def assert_is(model, states):
    assert difference_of_states(state_of(model), states) < 1e-5


class Saves(keras.callbacks.Callback):
    """Saves the model on some ranks, each to a file of its own."""

    def __init__(self, folder, ranks):
        super().__init__()
        self.folder, self.ranks = folder, ranks

    def on_epoch_end(self, epoch, logs=None):
        if keras_dist.rank() in self.ranks:
            self.model.save(self.folder / f"{keras_dist.rank()}.keras")


class Sizes(keras.callbacks.Callback):
    """Keeps the number of values in the optimizer's state, and those of the weights."""

    def on_epoch_end(self, epoch, logs=None):
        self.state = sum(math.prod(v.shape) for v in self.model.optimizer.variables)
        self.weights = self.model.count_params()


@pytest.mark.three_ranks
def test_each_rank_has_its_part_and_the_fit_leaves_a_plain_optimizer(
    world, train, expected
):
    """A second fit goes on, divided or not; so does one without a step."""
    sizes = Sizes()
    model = train(callbacks=[sizes])
    whole = 2 * sizes.weights
    assert sum(keras_dist.gather(sizes.state - 2)) == whole
    assert whole / world.size - 30 <= sizes.state - 2 <= whole / world.size + 30
    assert_equal_to_the_bit(model)
    assert type(model.optimizer) is keras.optimizers.Adam
    train(model, epochs=0)
    assert_is(model, expected())
    train(model, 1, shard_optimizer=False)
    train(
        model, 1, callbacks=[keras_dist.ReplicaCheck(every=2), keras_dist.NanReport()]
    )
    assert_is(model, expected(EPOCHS, 1, 1))


@pytest.mark.three_ranks
def test_a_rank_gets_its_part_of_large_gradients(train, expected, monkeypatch):
    """Unless a NaN guard looks at the whole ones."""
    sent = []

    def scatter(tensor, *args, **options):
        sent.append(tensor.shape)
        return comm.collectives.scatter(tensor, *args, **options)

    monkeypatch.setattr(sharded_state, "_SMALL", 4)
    monkeypatch.setattr(sharded_state.comm, "scatter", scatter)
    assert_is(train(), expected())
    num_sent = len(sent)
    assert num_sent > 0
    assert_is(train(callbacks=[keras_dist.NanReport()]), expected())
    assert len(sent) == num_sent


@pytest.mark.three_ranks
@pytest.mark.parametrize(("small", "state"), [(2**18, 114), (8, 2)])
def test_what_is_small_is_not_divided(
    world, train, expected, monkeypatch, capfd, small, state
):
    """All of this model, or its last bias: each rank has that state, and updates it."""
    monkeypatch.setattr(sharded_state, "_SMALL", small)
    sizes = Sizes()
    model = train(callbacks=[sizes], verbose=1)
    assert_is(model, expected())
    assert_equal_to_the_bit(model)
    divided = 114 - state
    assert sum(keras_dist.gather(sizes.state - 2)) == world.size * state + divided
    if world.rank == 0:
        assert ("too small to divide" in capfd.readouterr().out) == (divided == 0)


@pytest.mark.three_ranks
def test_an_overflow_in_the_part_of_one_rank_skips_the_update_on_all(
    rows, make_model, monkeypatch
):
    """As a loss scale asks: all ranks keep the weights, and halve the scale."""
    monkeypatch.setattr(sharded_state, "_SMALL", 4)
    scaled = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**40)
    model = make_model(scaled, jit_compile=False)
    kernel = model.trainable_weights[0]
    value = np.array(kernel)
    value[0] = 0  # of an input whose gradient is too large
    kernel.assign(value)
    before = [np.array(weight) for weight in model.weights]
    x, y = rows
    large = np.where(np.arange(x.shape[1]) == 0, 1e30, x).astype("float32")
    given = {"batch": "global", "batch_size": 16, "shuffle": False, "verbose": 0}
    keras_dist.dist_fit(model, large, y, shard_optimizer=True, **given)
    assert float(scaled.dynamic_scale) == 2.0**40 / 2**7
    for weight, expected in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.three_ranks
def test_a_model_is_saved_whole(folder, train, expected):
    """By a callback that writes, on all ranks, and by the first rank alone."""
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "c{epoch}.keras")
    train(callbacks=[checkpoint])
    keras_dist.gather(None)
    one = keras.models.load_model(folder / "c1.keras")
    assert_is(one, expected(1))
    train(one, 1)
    assert_is(one, expected(1, 1))

    class SavesInBlock(Saves):
        def on_epoch_end(self, epoch, logs=None):
            with keras_dist.whole_state(self.model):
                super().on_epoch_end(epoch)

    for ranks in (range(3), [0]):
        train(callbacks=[SavesInBlock(folder, ranks), Saves(folder, ranks)])
        keras_dist.gather(None)
        saved = keras.models.load_model(folder / "0.keras")
        assert_is(saved, expected())


def test_the_first_rank_has_the_state(rows, world, train, make_model):
    """The others get it, also what belongs to no variable: one alone loads a file."""

    def make():
        return make_model(keras.optimizers.Nadam(0.01), jit_compile=False)

    given = {"batch_size": 16, "shuffle": False, "verbose": 0}
    oracle, model = make(), make()
    oracle.fit(*rows, epochs=2, **given)
    if world.rank == 0:
        model.fit(*rows, epochs=1, **given)
    train(model, 1)
    assert_is(model, state_of(oracle))
    assert_equal_to_the_bit(model)


class Two(keras.Model):
    """An optimizer for each of two layers; the second is no argument of `compile`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(33), keras.layers.Dense(1)
        self.second = keras.optimizers.Adam(0.02)

    def call(self, x):
        return self.last(keras.ops.tanh(self.first(x)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for layer, each in ((self.first, self.optimizer), (self.last, self.second)):
            weights = layer.trainable_weights
            each.apply_gradients(
                zip(tape.gradient(loss, weights), weights, strict=True)
            )
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_an_optimizer_may_be_built_by_its_first_update(rows, train, run_eagerly):
    """Or on one rank alone, before the fit; and a bias is left out of the decay."""

    def make():
        keras.utils.set_random_seed(3)
        model = Two()
        model(rows[0][:1])
        first = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        first.exclude_from_weight_decay(var_list=[model.first.bias])
        first.build(model.trainable_weights)
        model.compile(first, "mse", run_eagerly=run_eagerly)
        return model

    oracle, model = make(), make()
    oracle.fit(*rows, batch_size=16, shuffle=False, epochs=EPOCHS, verbose=0)
    if keras_dist.rank() == 0:
        model.second.build(model.last.trainable_weights)
    train(model)
    ours, its = (
        [*one.weights, *one.optimizer.variables, *one.second.variables]
        for one in (model, oracle)
    )
    for own, expected in zip(ours, its, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


class Own(keras.optimizers.SGD):
    """Divides each gradient by its norm and one, which needs all of it."""

    def update_step(self, gradient, variable, learning_rate):
        norm = keras.ops.sqrt(keras.ops.sum(gradient**2)) + 1
        super().update_step(gradient / norm, variable, learning_rate)


class OwnByVariable(Own):
    sharded_by = "variable"


class Counts(OwnByVariable):
    """Has a number for each variable, and does not say so."""

    def build(self, variables):
        super().build(variables)
        self.counts = [self.add_variable(shape=(), name="count") for _ in variables]


class Late(keras.Model):
    """Makes its optimizer in the first step."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = keras.layers.Dense(1), None

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        self.own = self.own or Own(0.1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_what_is_known_only_in_the_first_step_is_an_error_on_all(train, make_model):
    """Whose a state is, and an optimizer that says nothing of itself."""
    with pytest.raises(ValueError, match="the name 'count'"):
        train(make_model(Counts(0.1)))
    late = Late()
    late.compile(loss="mse")
    with pytest.raises(ValueError, match="needs to know what"):
        train(late)


@pytest.mark.three_ranks
@pytest.mark.parametrize(("run_eagerly", "limit"), [(True, 0.01), (False, None)])
def test_a_rank_may_own_nothing(rows, train, monkeypatch, run_eagerly, limit):
    """Of two variables; it takes part in the averages, in a graph as well."""

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Lamb(0.01, global_clipnorm=limit)
        model.compile(optimizer, "mse", run_eagerly=run_eagerly, jit_compile=False)
        return model

    monkeypatch.setattr(sharded_state, "_SMALL", 1)
    monkeypatch.setattr(comm.collectives, "_LARGE", 1)  # a collective each
    model, oracle = make(), make()
    train(model)
    oracle.fit(*rows, batch_size=16, shuffle=False, epochs=EPOCHS, verbose=0)
    assert_is(model, state_of(oracle))
    assert_equal_to_the_bit(model)


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    "kind",
    shortened(
        [keras.optimizers.Adafactor, OwnByVariable], {keras.optimizers.Adafactor}
    ),
)
def test_whole_variables_are_dealt_out(folder, rows, world, train, make_model, kind):
    """What one rank owns is saved, restored and used after the fit by all."""

    def make():
        rate = 0.01 if kind is keras.optimizers.Adafactor else 0.1
        given = {"global_clipnorm": 0.1, "momentum": 0.9}
        given = given if kind is OwnByVariable else {}
        optimizer = kind(rate, weight_decay=0.01, **given)
        return make_model(optimizer, jit_compile=False)

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 10:
                raise KeyError("died")

    oracle = make()
    given = {"batch_size": 16, "shuffle": False, "verbose": 0}
    oracle.fit(*rows, epochs=EPOCHS, **given)
    sizes = Sizes()
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    options = {"resume": folder / "resume", "save_steps": 1}
    with contextlib.suppress(KeyError):
        train(make(), callbacks=[Dies()], **options)
    model = train(make(), callbacks=[checkpoint, sizes], **options)
    assert_is(model, state_of(oracle))
    assert_equal_to_the_bit(model)
    whole = sum(math.prod(variable.shape) for variable in oracle.optimizer.variables)
    assert max(keras_dist.gather(sizes.state)) < whole
    with keras.saving.custom_object_scope({"OwnByVariable": OwnByVariable}):
        saved = keras.models.load_model(folder / "2.keras")
    assert_is(saved, state_of(oracle))
    oracle.fit(*rows, epochs=1, **given)
    train(saved, 1)
    assert_is(saved, state_of(oracle))


@pytest.fixture
def own(rows, world):
    """This rank's 48 or 32 of 96 rows: with equal shares the mean is that of ranks."""
    x, y = rows
    return x[:96][world.rank :: world.size], y[:96][world.rank :: world.size, None]


def loop(optimizer, data, epochs=EPOCHS, model=None):
    """A training loop of the user's: a step an epoch."""
    if model is None:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(33, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(optimizer, "mse", jit_compile=False)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = model.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)

    for _ in range(epochs):
        step(*data)
    return model


@pytest.mark.three_ranks
@pytest.mark.parametrize("kind", ["Lamb", "several"])
def test_a_loop_of_the_users_own(folder, rows, world, own, kind):
    """The state stays divided; in `whole_state` it is saved, and nowhere else."""

    def make():
        if kind == "several":
            return several(0.01, is_callable=False)
        return getattr(keras.optimizers, kind)(0.01, clipnorm=0.1)

    x, y = rows
    oracle = make()
    expected = loop(oracle, (x[:96], y[:96, None]), 5)
    optimizer = keras_dist.DistributedOptimizer(make(), shard_optimizer=True)
    model = loop(optimizer, own, 4)
    whole = sum(math.prod(v.shape) for v in oracle.variables)
    assert (
        max(keras_dist.gather(sum(math.prod(v.shape) for v in optimizer.variables)))
        < whole
    )
    with pytest.raises(RuntimeError, match="can be saved where all ranks are"):
        model.save(folder / f"{world.rank}.keras")
    for ranks in ([0], range(world.size)):
        with keras_dist.whole_state(model):
            if world.rank in ranks:
                model.save(folder / f"{world.rank}.keras")
        keras_dist.gather(None)
        saved = keras.models.load_model(folder / "0.keras")
        assert_is(
            loop(saved.optimizer, (x[:96], y[:96, None]), 1, saved), state_of(expected)
        )
        keras_dist.gather(None)
    model.load_weights(folder / "0.keras")
    loop(optimizer, own, 1, model)
    with keras_dist.whole_state(optimizer):
        model.save(folder / f"{world.rank}.keras")
    saved = keras.models.load_model(folder / f"{world.rank}.keras")
    assert_is(saved, state_of(expected))
    assert_equal_to_the_bit(saved)
    with (
        pytest.raises((KeyError, RuntimeError), match="no space"),
        keras_dist.whole_state(model),
    ):
        if world.rank == 0:
            raise KeyError("no space")


@pytest.mark.three_ranks
def test_a_wrapped_optimizer_stays_divided(
    folder, rows, world, own, train, make_model, capfd
):
    """In plain `fit` with our callbacks, and in `dist_fit`, which saves it whole."""

    def make():
        return keras.optimizers.Adam(0.01, global_clipnorm=0.1)

    given = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    oracle = make_model(make(), run_eagerly=False, jit_compile=False)
    oracle.fit(rows[0][:96], rows[1][:96], batch_size=48, **given)
    oracle.fit(*rows, batch_size=16, **given)
    optimizer = keras_dist.DistributedOptimizer(make(), shard_optimizer=True)
    model = make_model(optimizer, run_eagerly=False, jit_compile=False)
    callbacks = [
        keras_dist.AverageStatistics(),
        keras_dist.ReplicaCheck(every=1),
        keras_dist.MetricAverage(),
        keras_dist.BroadcastVariables(),
    ]
    size = 48 // world.size
    model.fit(*own, batch_size=size, callbacks=callbacks, **given)
    with pytest.raises(ValueError, match="sync='every:2'"):
        train(model, shard_optimizer=False, sync="every:2", batch="rank")
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
    train(model, callbacks=[checkpoint], shard_optimizer=False, verbose=1)
    assert ("optimizer state" in capfd.readouterr().out) == (world.rank == 0)
    keras_dist.gather(None)
    assert_is(keras.models.load_model(folder / f"{EPOCHS}.keras"), state_of(oracle))
    assert sum(keras_dist.gather(math.prod(optimizer.variables[2].shape))) == 40
    for own, expected in zip(model.weights, oracle.weights, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


@pytest.mark.parametrize("is_callable", shortened([True, False], {True}))
def test_several_optimizers_inside_one(folder, rows, train, make_model, is_callable):
    """Saved, restored, gone on with and trained again, as one optimizer is."""

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 10:
                raise KeyError("died")

    def make():
        return make_model(several(0.01, is_callable), jit_compile=False)

    oracle = make()
    oracle.fit(*rows, batch_size=16, shuffle=False, epochs=EPOCHS, verbose=0)
    options = {"resume": folder / "resume", "save_steps": 1}
    with contextlib.suppress(KeyError):
        train(make(), callbacks=[Dies()], **options)
    sizes = Sizes()
    model = train(make(), callbacks=[sizes, Saves(folder, [0])], **options)
    assert_is(model, state_of(oracle))
    assert_equal_to_the_bit(model)
    assert max(keras_dist.gather(sizes.state)) < sum(
        math.prod(variable.shape) for variable in model.optimizer.variables
    )
    assert type(model.optimizer) is keras.optimizers.MultiOptimizer
    oracle.fit(*rows, batch_size=16, shuffle=False, epochs=1, verbose=0)
    train(model, 1)
    assert_is(model, state_of(oracle))
    if not is_callable:  # Keras cannot save a function
        saved = keras.models.load_model(folder / "0.keras")
        train(saved, 1)
        assert_is(saved, state_of(oracle))


def test_a_save_of_another_rank_alone_is_an_error_on_all(folder, train, expected):
    """Nobody waits; the state is whole again, and the training can go on."""
    model = train(epochs=0)
    with pytest.raises(RuntimeError, match="if the first rank does not"):
        train(model, callbacks=[Saves(folder, [1])])
    assert_is(model, expected(1))
    train(model)
    assert_is(model, expected(1, EPOCHS))


def test_after_an_error_that_no_other_rank_knows_nobody_waits(train):
    """Counter and weights are kept, and the rest of the state is made anew."""

    class Interrupted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    model = train(epochs=0)
    with pytest.raises(KeyboardInterrupt):
        train(model, callbacks=[Interrupted()])
    assert not model.optimizer.built
    assert int(model.optimizer.iterations) == 7
    train(model)
    assert_equal_to_the_bit(model)


def test_a_save_after_a_batch_is_an_error_on_all(folder, train):
    """Other ranks are not there."""

    class Often(Saves):
        on_train_batch_end = Saves.on_epoch_end

    with pytest.raises(RuntimeError, match="can be saved where all ranks are"):
        train(callbacks=[Often(folder, [0])])
    often = keras.callbacks.ModelCheckpoint(folder / "often.keras", save_freq=2)
    with pytest.raises(ValueError, match="save_freq=2"):
        train(callbacks=[often])


def test_a_backup_restores_the_state(folder, train, expected, make_model):
    """`BackupAndRestore` writes, and reads before there are parts."""

    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyError("died")

    def backup():
        return keras.callbacks.BackupAndRestore(folder / "backup")

    with pytest.raises(KeyError):
        train(callbacks=[backup(), Dies()])
    assert_is(train(callbacks=[backup()]), expected())
    several_inside = make_model(several(0.01, is_callable=False))
    with pytest.raises(KeyError):
        train(several_inside, callbacks=[backup(), Dies()])
    with pytest.raises(ValueError, match="use `resume` of `dist_fit`"):
        train(make_model(several(0.01, is_callable=False)), callbacks=[backup()])


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("before", "after"),
    shortened(
        [(True, True), (True, False), (False, True)], {(True, False), (False, True)}
    ),
)
def test_a_training_goes_on_divided_or_not(folder, train, expected, before, after):
    """A checkpoint in the middle of an epoch has the whole state."""

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 10:
                raise KeyError("died")

    options = {"resume": folder / "resume", "save_steps": 1}
    with contextlib.suppress(KeyError):
        train(callbacks=[Dies()], shard_optimizer=before, **options)
    assert_is(train(shard_optimizer=after, **options), expected())


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("before", "after", "batch"),
    shortened(
        [(False, False, 7), (False, False, 9), (True, True, 9)]
        + [(False, True, 9), (True, False, 9), (False, True, 7)],
        {(False, False, 7), (True, True, 9)},
    ),
)
def test_accumulated_gradients_go_on(folder, rows, make_model, before, after, batch):
    """Those of this rank or of all, saved within an epoch or at its end."""

    class Dies(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch_of_epoch, logs=None):
            self.seen += 1
            if self.seen > batch:
                raise KeyError("died")

    def make():
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)
        return make_model(optimizer, jit_compile=False)

    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": EPOCHS}
    oracle, model = make(), make()
    oracle.fit(*rows, **options)
    options |= {"batch": "global", "resume": folder / "resume"}
    if batch != 7:  # the number of batches of an epoch
        options["save_steps"] = 1
    with contextlib.suppress(KeyError):
        keras_dist.dist_fit(
            make(), *rows, callbacks=[Dies()], shard_optimizer=before, **options
        )
    keras_dist.dist_fit(model, *rows, shard_optimizer=after, **options)
    assert_is(model, state_of(oracle))
    assert_equal_to_the_bit(model)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (Own, {}, "needs to know what an optimizer updates by itself"),
        (keras.optimizers.Adam, {"sync": "every:2", "batch": "rank"}, "sync='every:2'"),
        (keras.optimizers.Adam, {"process_set": [0, 1]}, "process_set"),
        (keras.optimizers.Adam, {"shard_optimizer": "yes"}, "True or False"),
        (
            keras.optimizers.Adam,
            {"callbacks": [keras.callbacks.SwapEMAWeights()]},
            "SwapEMAWeights",
        ),
    ],
)
def test_what_cannot_be_divided_is_an_error(
    train, make_model, optimizer, options, message
):
    """Before the training, on all ranks."""
    with pytest.raises(ValueError, match=message):
        train(make_model(optimizer()), **options)
