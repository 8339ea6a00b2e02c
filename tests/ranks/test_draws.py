"""What all ranks run draws alike, without a seed too; a rank alone draws its own."""

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened
from harness.data_kinds import Sequence

import keras_dist
from keras_dist import private

pytestmark = [pytest.mark.several_ranks, pytest.mark.three_ranks]
pytestmark.append(pytest.mark.slow_on_three)


def counting_model():
    """Each visit of a row of `np.eye(48)`, in batches of 12, adds 1 to its weight."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((48,)), layer])
    model.compile(keras.optimizers.SGD(12.0), loss=lambda y, p: -p)
    return model


def read(rows):
    """A batch of these rows."""
    return np.eye(48, dtype="float32")[rows], np.zeros((len(rows), 1), "float32")


class Shuffled(keras.utils.PyDataset):
    """Shuffles in `on_epoch_end`; notes what `__getitem__` draws.

    Args:
        generator: One of its own, as loaders inside of packages have; `None` for that
            of `numpy.random`, without a seed.
    """

    def __init__(self, generator=None):
        super().__init__()
        self.generator, self.drawn = generator, []
        self.order = (generator or np.random).permutation(48)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.drawn.append(np.random.rand())
        return read(np.split(self.order, 4)[index])

    def on_epoch_end(self):
        (self.generator or np.random).shuffle(self.order)


def endless(generator=np.random):
    """Batches of one pass after the other, each in an order of its own."""
    while True:
        yield from map(read, np.split(generator.permutation(48), 4))


def dataset():
    """A `from_generator` that shuffles in each pass."""

    def passes():
        return zip(*read(np.random.permutation(48)), strict=True)

    spec = tf.TensorSpec((48,), "float32"), tf.TensorSpec((1,), "float32")
    data = tf.data.Dataset.from_generator(passes, output_signature=spec)
    return data.batch(12).repeat()


def unseeded(world):
    """Other states on each rank, as in a script without a seed."""
    random.seed(100 + world.rank)
    np.random.seed(100 + world.rank)


@pytest.mark.parametrize("make", [endless, dataset, Shuffled])
def test_a_loader_without_a_seed_reads_every_row_once_an_epoch(world, make):
    """Shuffled by `numpy.random`, in each pass or in `on_epoch_end`."""
    unseeded(world)
    data = keras_dist.broadcast(Shuffled() if make is Shuffled else None) or make()
    model, steps = counting_model(), None if make is Shuffled else 4
    given = {"steps_per_epoch": steps, "epochs": 3, "verbose": 0}
    keras_dist.dist_fit(model, data, batch="global", **given)
    np.testing.assert_allclose(model.get_weights()[0], 3, rtol=1e-5)
    after = keras_dist.gather([random.random(), np.random.rand()])
    assert after.count(after[0]) == world.size


@pytest.mark.parametrize("is_sequence", [True, False])
def test_the_first_rank_reads_a_loader_with_its_own_generator(world, is_sequence):
    """With `shard="first"` every row is trained on once an epoch."""
    generator = np.random.default_rng(world.rank)
    data = (Shuffled if is_sequence else endless)(generator)
    model, steps = counting_model(), None if is_sequence else 4
    given = {"steps_per_epoch": steps, "epochs": 3, "verbose": 0}
    keras_dist.dist_fit(model, data, batch="global", shard="first", **given)
    np.testing.assert_allclose(model.get_weights()[0], 3, rtol=1e-5)


def test_an_error_of_the_first_ranks_loader(world):
    """It is raised on all ranks."""

    def broken():
        yield from [next(endless(np.random.default_rng(0)))] * 3
        raise OSError("no such picture")

    with pytest.raises((OSError, RuntimeError), match="no such picture"):
        keras_dist.dist_fit(counting_model(), broken(), verbose=0, shard="first")


def test_an_error_of_one_rank_while_the_first_reads(world):
    """An argument of one rank: all have looked at the first batches before."""
    data = endless(np.random.default_rng(0))
    given = {"steps_per_epoch": 0 if world.rank == world.size - 1 else 4, "verbose": 0}
    with pytest.raises(ValueError, match="`steps_per_epoch` must be"):
        keras_dist.dist_fit(counting_model(), data, shard="first", **given)


def test_a_generator_that_differs_is_named_before_training(world):
    """A warning on the first rank; the shuffle after epoch 1 is then an error."""
    data = Shuffled(np.random.default_rng(world.rank))
    data.order = np.arange(48)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="After `on_epoch_end`"):
            keras_dist.dist_fit(counting_model(), data, epochs=2, verbose=0)
    found = [each for each in caught if 'shard="first"' in str(each.message)]
    assert len(found) == (world.rank == 0)
    assert all("`generator`" in str(each.message) for each in found)
    assert all(each.filename == __file__ for each in found)


def test_operations_without_a_seed_draw_alike_after_the_first_rank_has_drawn(world):
    """A generator that shuffles by `tf.random` reads the same order on all ranks."""
    keras.utils.set_random_seed(1)
    orders = []

    def batches():
        while True:
            orders.append(tf.random.shuffle(tf.range(48)).numpy())
            yield from map(read, np.split(orders[-1], 4))

    draw = keras_dist.first_rank_only(keras.callbacks.LambdaCallback())
    draw.on_epoch_end = lambda epoch, logs=None: tf.random.normal((world.rank + 1,))
    model = counting_model()
    options = {"steps_per_epoch": 4, "epochs": 3, "batch": "global", "verbose": 0}
    keras_dist.dist_fit(model, batches(), callbacks=[draw], **options)
    assert len(orders) >= 3
    for everyone in zip(*keras_dist.gather(orders), strict=True):
        assert all((order == everyone[0]).all() for order in everyone)


def test_validation_data_that_draws_leaves_the_training_data_alike(world):
    """Each rank makes other batches of it, of other lengths: the last has two rows."""

    class Images(Shuffled):
        def __getitem__(self, index):
            rows = self.order[12 * index :][:12]
            np.random.random(len(rows))
            return read(rows)

    validation = Images()
    validation.order = validation.order[:14]
    model, data = counting_model(), Images()
    options = {"validation_data": validation, "batch": "global", "verbose": 0}
    keras_dist.dist_fit(model, data, epochs=3, **options)
    assert (model.get_weights()[0] == 3).all()
    states = keras_dist.gather(np.random.get_state(legacy=False))
    assert all(repr(state) == repr(states[0]) for state in states)


def test_a_look_at_validation_data_leaves_the_training_its_numbers(world, capsys):
    """Keras looks after the first epoch. The plan says that a pass leaves them, too."""

    def batches(drawn):
        while True:
            drawn.append(np.random.random())
            yield read(np.arange(12))

    runs = []
    for given in {}, {"validation_data": batches([]), "validation_steps": 1}:
        np.random.seed(3)
        runs.append([])
        given |= {"steps_per_epoch": 4, "batch": "global", "verbose": 2}
        keras_dist.dist_fit(counting_model(), batches(runs[-1]), **given)
    assert runs[0][:4] == runs[1][:4]
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("does not change what the training draws" in printed) == (world.rank == 0)


def test_a_fit_in_a_callback_leaves_the_outer_fit_its_own_numbers(world):
    """Each rank adds noise of its own to its own rows, before and after it."""
    drawn = []

    class Noisy(Shuffled):
        def __getitem__(self, index):
            drawn.append(np.random.normal())
            return read(np.arange(12))

    def train(epoch, logs):
        if epoch == 0:
            x, y = read(np.arange(48))
            keras_dist.dist_fit(counting_model(), x, y, batch="global", verbose=0)

    inner = keras.callbacks.LambdaCallback(on_epoch_end=train)
    options = {"shard": "none", "verbose": 0, "callbacks": [inner]}
    keras_dist.dist_fit(counting_model(), Noisy(), epochs=3, **options)
    for everyone in zip(*keras_dist.gather(drawn[-6:]), strict=True):
        assert len(set(everyone)) == world.size


def test_batches_of_one_rank_have_their_own_noise(world):
    """`__getitem__` draws the rank's own; `on_epoch_end` shuffles alike."""
    unseeded(world)
    data = keras_dist.broadcast(Shuffled())
    model = counting_model()
    keras_dist.dist_fit(model, data, epochs=3, verbose=0, lr_scaling="none")
    everyone = keras_dist.gather(data.drawn[-2])  # the last one was a look
    assert len(set(everyone)) == world.size
    orders = keras_dist.gather(data.order.tolist())
    assert orders.count(orders[0]) == world.size


@pytest.mark.parametrize("steps", [None, 3, 4])
def test_batches_of_a_sequence_come_in_the_order_of_keras(steps):
    """With `shuffle=True`, the default of `fit`, a seed, and passes over epochs."""

    def make():
        keras.utils.set_random_seed(5)
        model = counting_model()
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    how = {"shuffle": True, "epochs": 3, "steps_per_epoch": steps, "tolerance": 2e-5}
    x = np.eye(48, dtype="float32")
    data = Sequence(x, x[:, :1], [12])
    assert_equals_one_process(make, lambda _: data, batch="global", **how)


class Draws(keras.callbacks.Callback):
    """Draws at the beginning of each batch."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def on_train_batch_begin(self, batch, logs=None):
        self.drawn.append((random.random(), float(np.random.rand())))


def test_callbacks_draw_alike(world):
    """Also where one that runs on the first rank only draws, too."""
    unseeded(world)
    draws, alone = Draws(), keras_dist.first_rank_only(Draws())
    x = np.ones((24, 48), "float32")
    both = [alone, draws]
    keras_dist.dist_fit(counting_model(), x, x[:, :1], callbacks=both, verbose=0)
    everyone = keras_dist.gather(draws.drawn)
    assert everyone[0] and everyone.count(everyone[0]) == world.size


class Noise(keras.layers.Layer):
    """Adds noise that is given no seed, and keeps what it returned."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seen = self.add_weight(shape=(8,), trainable=False, initializer="zeros")

    def call(self, x):
        x = x + self.draw((8,))
        self.seen.assign(x[0])
        return x


class Seen(keras.callbacks.Callback):
    """Reads what the layers returned at the last batch."""

    def on_train_batch_end(self, batch, logs=None):
        layers = [layer for layer in self.model.layers if isinstance(layer, Noise)]
        self.values = [layer.seen.numpy().tolist() for layer in layers]


@pytest.mark.parametrize(
    ("run_eagerly", "jit_compile"),
    shortened([(False, False), (True, False), (False, True)], {(False, False)}),
)
def test_noise_without_a_seed(world, run_eagerly, jit_compile):
    """After `set_random_seed`, `tf.random` draws each rank's own without a graph.

    In a graph, and by `keras.random`, it draws what one process draws: what all rows
    share, all ranks share.
    """
    keras.utils.set_random_seed(3)
    layers = [Noise(keras.random.normal)]
    if not jit_compile:  # XLA draws for `tf.random` by itself, whatever the seed
        layers.append(Noise(tf.random.normal))
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=run_eagerly, jit_compile=jit_compile)
    x, seen = np.zeros((12, 8), "float32"), []
    for _ in range(2):
        given = {"batch_size": 2, "callbacks": [callback := Seen()], "verbose": 0}
        keras_dist.dist_fit(model, x, x[:, :1], **given)
        seen += callback.values
    by_rank = [list(map(tuple, values)) for values in keras_dist.gather(seen)]
    every = {value for values in by_rank for value in values}
    shared = 2 if run_eagerly else len(seen)
    own = (len(seen) - shared) * world.size
    assert len(every) == shared + own
    after = keras_dist.gather(tf.random.normal(()).numpy().item())
    assert after.count(after[0]) == world.size


class Langevin(keras.optimizers.SGD):
    """Adds noise that is given no seed to each update."""

    def __init__(self, draw):
        super().__init__(0.05)
        self.draw = draw

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient + 0.1 * self.draw(variable.shape)
        super().update_step(gradient, variable, learning_rate)


class Jitter(keras.constraints.Constraint):
    """Adds noise that is given no seed to a weight, after each update."""

    def __call__(self, weight):
        return weight + 0.01 * keras.random.normal(weight.shape)


def train_with_noise(fit, draw, jit_compile, **arguments):
    """The weights after a fit that draws in its updates.

    Each rank has four rows in a step, of which the kernel has a multiple.
    """
    rows = 4 * keras_dist.size()
    layer = keras.layers.Dense(1, kernel_constraint=Jitter())
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile(Langevin(draw), "mse", jit_compile=jit_compile)
    x = np.linspace(-1, 1, 16 * rows, dtype="float32").reshape(-1, 8)
    fit(model, x, x[:, :1], rows, shuffle=False, verbose=0, **arguments)
    return [value.tolist() for value in model.get_weights()]


@pytest.mark.parametrize("jit_compile", shortened([False, True], {False}))
def test_an_update_draws_as_on_one_process(jit_compile):
    """Optimizers and constraints with noise, after `set_random_seed`."""
    weights = []
    for fit, batch in (keras.Model.fit, {}), (keras_dist.dist_fit, {"batch": "global"}):
        private.keras_state().pop(private.SEED_GENERATOR, None)  # as Keras 3.15
        keras.utils.set_random_seed(3)
        draw = keras.random.normal
        weights.append(train_with_noise(fit, draw, jit_compile, **batch))
    for own, expected in zip(*reversed(weights), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draw", [keras.random.normal, tf.random.normal])
def test_an_update_draws_alike_whatever_the_seeds(world, draw):
    """Without a seed, or with one of each rank, also for `model.fit`."""
    private.keras_state().pop(private.SEED_GENERATOR, None)
    unseeded(world)
    tf.random.set_seed(world.rank)

    def fit(model, *data, **given):
        keras_dist.DistributedOptimizer(model.optimizer)
        calls = [keras_dist.ReplicaCheck(), keras_dist.BroadcastVariables()]
        model.fit(*data, callbacks=calls, **given)

    everyone = keras_dist.gather(train_with_noise(fit, draw, False))
    assert everyone.count(everyone[0]) == world.size


@pytest.mark.parametrize("is_made", shortened([False, True], {True}))
def test_a_fit_draws_nothing_from_the_generator_of_keras(is_made):
    """`random` and `keras.random` go on as after `model.fit`, whoever drew before."""
    x, drawn = np.eye(48, dtype="float32"), []
    for fit in keras.Model.fit, keras_dist.dist_fit:
        private.keras_state().pop(private.SEED_GENERATOR, None)  # as Keras 3.15
        keras.utils.set_random_seed(1)
        model = counting_model()
        if is_made:
            keras.random.normal(())
        fit(model, x, x[:, :1], verbose=0)
        drawn.append([random.random(), keras.random.normal((8,)).numpy().tolist()])
    assert drawn[0] == drawn[1]


@pytest.mark.long
def test_noise_is_another_in_each_model_and_the_same_with_the_same_seed():
    """Models that are made before the first of them is trained, too."""
    x, seen = np.zeros((12, 8), "float32"), []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        layers = [[Noise(keras.random.normal), keras.layers.Dense(1)] for _ in "ab"]
        models = [keras.Sequential([keras.Input((8,)), *pair]) for pair in layers]
        for model in models:
            model.compile("sgd", "mse")
            callback = Seen()
            given = {"batch_size": 2, "callbacks": [callback], "verbose": 0}
            keras_dist.dist_fit(model, x, x[:, :1], **given)
            seen += callback.values
    assert seen[:2] == seen[2:] and seen[0] != seen[1]
