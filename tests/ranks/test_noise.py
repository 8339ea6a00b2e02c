"""Random numbers of a step: of the global batch, those that one process draws.

The oracle is plain Keras on one process. `keras_ways/noise.py` has Keras's layers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened, warned

import keras_dist
from keras_dist.training import noise

layers, ops = keras.layers, keras.ops

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.usefixtures("in_float64"),
]

NUM_ROWS = 23  # of which the last batch of seven has two: some ranks have none

SEQUENCE, VECTOR = (5, 4), (8,)


class Attends(keras.Model):
    """Attention with dropout, and a sample of a normal distribution for each row."""

    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 3, dropout=0.3)
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        x = ops.mean(self.attend(x, x, training=training), axis=1)
        if training:
            x += 0.3 * keras.random.normal(ops.shape(x))
            x += 0.3 * keras.random.truncated_normal(ops.shape(x))
            x *= keras.random.uniform(())  # the same for all rows
            x += 0.3 * keras.random.beta(ops.shape(x), 0.4, ops.exp(x))
            for alpha in (2.0, ops.cast([0.5, 1, 2, 3], x.dtype), ops.exp(x)):
                x += 0.1 * keras.random.gamma(ops.shape(x), alpha)
            x += 0.1 * keras.random.binomial(ops.shape(x), 5.0, 0.3)
        return self.last(x)


def data_for(shape):
    """Rows of pictures, sequences or vectors between 0 and 1, and a number for each."""
    x = np.random.default_rng(5).uniform(size=(NUM_ROWS, *shape))
    return x, x.reshape(NUM_ROWS, -1)[:, :2].sum(axis=1, keepdims=True)


def maker(build, **compiled):
    """A function that makes the same compiled model at each call."""

    def make():
        keras.utils.set_random_seed(9)
        model = build()
        how = {"jit_compile": False, **compiled}
        model.compile(keras.optimizers.SGD(0.05), "mse", **how)
        return model

    return make


def stack(shape, layer):
    """A model of one random layer and a dense one."""
    return keras.Sequential(
        [keras.Input(shape), layer(), layers.Flatten(), layers.Dense(1)]
    )


def assert_equals(make, data, size=7, **arguments):
    """The claim of this file."""
    given = {"batch": "global", "epochs": 3, "tolerance": 1e-9} | arguments
    return assert_equals_one_process(make, data, size, **given)


@pytest.mark.parametrize(
    "how",
    shortened(["run_eagerly", "steps_per_execution", ""], {"run_eagerly", ""}),
)
def test_draws_of_a_model_equal_one_process(how):
    """Of functions without a seed, too; in a graph or not."""
    more: dict = {how: 2 if how == "steps_per_execution" else True} if how else {}
    assert_equals(maker(Attends, **more), data_for(SEQUENCE))


def test_what_xla_compiles_draws_the_numbers_of_one_process():
    """XLA has other numbers than TensorFlow, and pairs the halves of normal ones."""

    def build():
        noise = [layers.GaussianNoise(0.5), layers.Dropout(0.3)]
        return keras.Sequential([keras.Input(VECTOR), *noise, layers.Dense(1)])

    with warned("Training without XLA") as texts:
        assert_equals(maker(build, jit_compile=True), data_for(VECTOR))
    assert not texts


@pytest.mark.parametrize("batch", shortened(["rank", "global"], {"rank"}))
def test_batches_of_a_data_set_have_the_numbers_of_one_process(batch):
    """Dealt whole to the ranks, or shared by them."""
    x, y = data_for(VECTOR)

    def data(size):
        rows = tf.data.Dataset.from_tensor_slices((x[:21], y[:21]))
        return rows.batch(size)

    make = maker(lambda: stack(VECTOR, lambda: layers.Dropout(0.5)))
    assert_equals(make, data, 7 if batch == "global" else 2, batch=batch)


class DrawsForItsShape(layers.Layer):
    """Noise of a shape that TensorFlow computes: not known while a step is traced."""

    def call(self, x):
        shape = tf.shape(x)[0], tf.shape(x)[1]
        return x + keras.random.normal(shape) * tf.random.uniform(shape, dtype=x.dtype)


def test_batches_of_one_length_have_the_numbers_of_one_process():
    """Their number of rows is known while the step is traced."""
    x, y = data_for(VECTOR)

    def data(size):
        rows = tf.data.Dataset.from_tensor_slices((x[:21], y[:21]))
        return rows.batch(size, drop_remainder=True)

    assert_equals(maker(lambda: stack(VECTOR, DrawsForItsShape)), data, 6)


def test_layers_in_a_map_have_the_numbers_of_one_process():
    """The first batches, which are read before the fit, do not move them."""
    x, y = data_for(VECTOR)

    def data(size):
        noise = layers.GaussianNoise(0.5, seed=3)
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
        return rows.map(lambda a, b: (noise(a, training=True), b), 1).prefetch(2)

    make = maker(lambda: stack(VECTOR, lambda: layers.Dense(3)), run_eagerly=True)
    assert_equals(make, data, 7)


class Draws(keras.Model):
    """Keeps the numbers of its last step: one array for each kind and dtype."""

    def __init__(self):
        super().__init__()
        self.seeds, self.last = keras.random.SeedGenerator(5), layers.Dense(1)

    def call(self, x, training=False):
        if training:
            shape, given = (len(x), 3), {"seed": self.seeds}
            kinds = keras.random.normal, keras.random.uniform
            dtypes = "float16", "bfloat16", "float32", "float64"
            drawn = [k(shape, dtype=d, **given) for k in kinds for d in dtypes]
            drawn.append(keras.random.randint(shape, 0, 10**6, **given))
            drawn.append(keras.random.truncated_normal(shape, **given))
            for alpha in 0.3, ops.full(shape, 0.3):
                drawn.append(keras.random.gamma(shape, alpha, **given))
            drawn.append(keras.random.normal((2, 3), **given))  # no rows
            drawn.append(keras.random.dropout(ops.ones(shape), 0.5, **given))
            self.drawn = [ops.convert_to_numpy(ops.cast(d, "float64")) for d in drawn]
        return self.last(x)


def test_numbers_of_each_kind_and_dtype_are_rows_of_one_draw(monkeypatch):
    """To the bit, in a global batch of 23 rows."""
    monkeypatch.setenv("KERAS_DIST_TRIAL", "0")
    drawn = []
    for fit, more in (keras.Model.fit, {}), (keras_dist.dist_fit, {"batch": "global"}):
        model = maker(Draws, run_eagerly=True)()
        fit(model, *data_for(VECTOR), batch_size=NUM_ROWS, verbose=0, **more)
        drawn.append(model.drawn)
    for index, (expected, own) in enumerate(zip(*drawn, strict=True)):
        rows = own if len(expected) == 2 else np.concatenate(keras_dist.gather(own))
        assert np.array_equal(rows, expected), index


def test_a_second_fit_goes_on_where_the_first_has_ended():
    """The generators' states are those of one process."""
    x, y = data_for(VECTOR)
    found = []
    for fit, more in (
        (keras.Model.fit, {}),
        (keras_dist.dist_fit, {"batch": "global"}),
    ):
        model = maker(lambda: stack(VECTOR, lambda: layers.GaussianNoise(0.5)))()
        given = {"batch_size": 7, "epochs": 2, "verbose": 0} | more
        losses = [fit(model, x, y, **given).history["loss"] for _ in range(2)]
        found.append((losses, model.get_weights()))
    np.testing.assert_allclose(found[1][0], found[0][0], 1e-9)
    for own, other in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(own, other, 1e-8)


class DrawsByTensorFlow(keras.Model):
    """Draws by `tf.random` for each row, for several numbers a row, and for none.

    Its step is that of a discriminator: two numbers a row, in two blocks of rows.
    """

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8), layers.Dense(1)

    def train_step(self, data):
        x, y = data
        noise = tf.random.normal(tf.shape(x), dtype=x.dtype)
        noise *= tf.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype)
        kinds = tf.random.uniform(tf.shape(x), 0, 3, tf.int32)
        noise += tf.cast(kinds, x.dtype) * tf.random.truncated_normal((), dtype=x.dtype)
        targets = tf.concat([y, -y], axis=0)
        targets += 0.3 * tf.random.uniform(tf.shape(targets), dtype=y.dtype)
        with tf.GradientTape() as tape:
            made = self.last(self.first(tf.concat([x, noise], axis=0)))
            loss = self.compute_loss(y=targets, y_pred=made)
        gradients = tape.gradient(loss, self.trainable_weights)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("batch", shortened(["rank", "global"], {"global"}))
def test_numbers_of_tensorflow_in_a_graph_are_those_of_one_process(batch):
    """After `set_random_seed`; in the next fit, too, which one process traces not."""
    x, y = data_for(VECTOR)
    found, size = [], 7 if batch == "global" else 2 * keras_dist.size()
    for fit, more in (
        (keras.Model.fit, {"batch_size": size}),
        (keras_dist.dist_fit, {"batch": batch, "lr_scaling": "none"}),
    ):
        model = maker(DrawsByTensorFlow, steps_per_execution=2)()
        own = size if batch == "global" else 2
        given = {"batch_size": own, "epochs": 2, "verbose": 0, "shuffle": False}
        for _ in range(2):
            fit(model, x, y, **given | more)
        found.append(model.get_weights())
    for own, expected in zip(*reversed(found), strict=True):
        np.testing.assert_allclose(own, expected, 1e-8, 1e-9)


def test_numbers_of_tensorflow_go_on_where_a_checkpoint_was_written(folder):
    """In the middle of an epoch, too: all weights are those without an interruption."""
    x, y = data_for(VECTOR)
    given = {"batch": "global", "batch_size": 6, "verbose": 0, "epochs": 2}
    expected = maker(DrawsByTensorFlow)()
    keras_dist.dist_fit(expected, x, y, **given)

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:
                raise KeyError("ends")

    more = {"resume": folder / "checkpoints", "save_steps": 1}
    with pytest.raises(KeyError):
        keras_dist.dist_fit(
            maker(DrawsByTensorFlow)(), x, y, **given, **more, callbacks=[Ends()]
        )
    model = maker(DrawsByTensorFlow)()
    keras_dist.dist_fit(model, x, y, **given, **more)
    for own, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, 1e-12)


class Samples(keras.Model):
    """Draws in evaluations and predictions, too: by a seed and without one."""

    by_tensorflow = False

    def __init__(self):
        super().__init__()
        self.seeds, self.last = keras.random.SeedGenerator(5), layers.Dense(1)

    def call(self, x, training=False):
        if self.by_tensorflow:
            x *= tf.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype)
        x += 0.3 * keras.random.normal(ops.shape(x), seed=self.seeds)
        return self.last(x * keras.random.uniform(ops.shape(x)))


class SamplesByTensorFlow(Samples):
    """By `tf.random`, too, in a graph."""

    by_tensorflow = True


class DrawsAtEpochEnd(keras.callbacks.Callback):
    """Predicts, and draws, on the first rank alone or on all."""

    def on_epoch_end(self, epoch, logs=None):
        self.model(np.ones((2, *VECTOR)))
        keras.random.normal((3,))


@pytest.mark.parametrize("how", shortened(["", "steps_per_execution"], {""}))
def test_evaluations_draw_by_tensorflow_as_one_process(how):
    """Of which the last batch is shorter, and two ranks or three have none or one."""
    x, y = data_for(VECTOR)
    more: dict = {how: 2} if how else {}
    for size in 5, 17, 60:
        given = {"validation_data": (x, y), "validation_batch_size": size}
        assert_equals(maker(SamplesByTensorFlow, **more), (x, y), **given)


@pytest.mark.parametrize(
    "how",
    shortened(
        ["run_eagerly", "steps_per_execution", "jit_compile", ""],
        {"steps_per_execution"},
    ),
)
def test_evaluations_and_predictions_draw_the_numbers_of_one_process(how):
    """Of batches that are dealt, and the training goes on as after all of them."""
    more: dict = {how: 2 if how == "steps_per_execution" else True} if how else {}
    x, y = data_for(VECTOR)
    found = []
    for make, options in (
        (lambda model: model, {}),
        (keras_dist.DistributedModel, {"batch": "global"}),
    ):
        model, results = maker(Samples, **more)(), []
        trainer = make(model)
        # Five batches, or two of data of unknown length, for two ranks or three.
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(17)
        for size, valid in (5, (x, y)), (None, (rows.filter(lambda *_: True),)):
            fit = trainer.fit(
                *(x, y, 7),
                epochs=2,
                verbose=0,
                validation_data=valid if size else valid[0],
                validation_batch_size=size,
                callbacks=[DrawsAtEpochEnd()],
                **options,
            )
            results.append([fit.history[name] for name in ("loss", "val_loss")])
            results.append(trainer.evaluate(*valid, batch_size=size, verbose=0))
            results.append(trainer.predict(x, batch_size=size or 17, verbose=0))
        found.append([*results, *model.get_weights(), keras.random.uniform((2,))])
    for own, expected in zip(*reversed(found), strict=True):
        np.testing.assert_allclose(own, expected, 1e-8, 1e-9)


def test_what_a_callback_of_the_first_rank_draws_is_put_back():
    """The training draws as without it."""
    drawing = keras_dist.first_rank_only(DrawsAtEpochEnd())
    make = maker(Samples, run_eagerly=True)
    assert_equals(make, data_for(VECTOR), options={"callbacks": [drawing]})


class DrawsUnevenly(keras.Model):
    """Draws more in some batches of an evaluation than in others."""

    def __init__(self):
        super().__init__()
        self.seeds, self.last = keras.random.SeedGenerator(5), layers.Dense(1)

    def call(self, x, training=False):
        for _ in range(1 + (len(x) < 5)):
            x += keras.random.normal(ops.shape(x), seed=self.seeds)
        return self.last(x)


def test_batches_that_draw_unevenly_are_named(world):
    """No rank knows what the others' batches have drawn."""
    model = keras_dist.DistributedModel(maker(DrawsUnevenly, run_eagerly=True)())
    with warned("do not draw as many random numbers") as texts:
        model.evaluate(*data_for(VECTOR), batch_size=5, verbose=0)
    assert len(texts) == (world.rank == 0)


def test_numbers_of_each_rank_are_named(world, caplog, monkeypatch):
    """Of some of `tf.random`, and of many that cannot be skipped; no others."""

    class Noise(layers.Layer):
        def call(self, x):
            return (
                x
                + keras.random.normal(ops.shape(x))
                + tf.random.gamma([], 2.0, dtype=x.dtype)
            )

    class Truncated(layers.Layer):
        def call(self, x):
            return x + keras.random.truncated_normal(ops.shape(x))

    monkeypatch.setattr(noise, "_MOST_NUMBERS", 100)
    for layer, count in (
        (Noise, 1),
        (Truncated, 1),
        (lambda: layers.Dropout(0.5), 0),
    ):
        caplog.clear()
        model = maker(lambda: stack(VECTOR, layer))()  # noqa: B023
        keras_dist.dist_fit(model, *data_for(VECTOR), batch="global", verbose=2)
        lines = [text for text in caplog.messages if "random numbers: each" in text]
        assert len(lines) == count * (world.rank == 0)


class Chooses(keras.Model):
    """Keeps what each of its rows has drawn, in a column for each kind."""

    seen: list = []

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(1)

    def call(self, x, training=False):
        if training:
            alpha = ops.ones((ops.shape(x)[0],))
            columns = [
                keras.random.binomial(ops.shape(alpha), 1000.0 * alpha, 0.5 * alpha),
                keras.random.categorical(ops.zeros((ops.shape(x)[0], 10**6)), 1)[:, 0],
            ]
            kinds = [np.asarray(column, "float64") for column in columns]
            Chooses.seen.append(np.stack(kinds, axis=1))
        return self.last(x)


def test_what_is_drawn_from_arguments_differs_on_each_rank(world, monkeypatch):
    """`binomial` and `categorical`: another draw on each rank and row."""
    monkeypatch.setenv("KERAS_DIST_TRIAL", "0")
    monkeypatch.setattr(Chooses, "seen", [])
    model = maker(Chooses, run_eagerly=True)()
    count = 4 * world.size
    x, y = data_for(VECTOR)
    x, y = np.resize(x, (count, *VECTOR)), np.resize(y, (count, 1))
    keras_dist.dist_fit(model, x, y, batch="global", batch_size=count, verbose=0)
    everyone = np.concatenate(keras_dist.gather(Chooses.seen[-1]))
    assert len(set(everyone[:, 0].tolist())) > world.size
    assert len(set(everyone[:, 1].tolist())) == count
