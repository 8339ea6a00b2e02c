"""A step is tried before the first update: what N ranks cannot equal is said."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    assert_same_bits,
    shortened,
    warned,
)

import keras_dist

pytestmark = [pytest.mark.several_ranks, pytest.mark.usefixtures("in_float64")]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 3))
Y = RANDOM.normal(size=(48, 1))


# How inputs move by the gradient with respect to them, and how noisy errors add up.
MOVES = {"adversarial": tf.stop_gradient, "sign": lambda slope: 0.1 * tf.sign(slope)}
REDUCES = {"noisy_sum": tf.reduce_sum, "noisy_mean": tf.reduce_mean}


class Steps(keras.Sequential):
    """A train step that changes something between the loss and the update."""

    way = ""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        if self.way == "graph alone":
            loss = tf.reduce_sum(tf.square(y - self(x))) / 24
            gradients = tf.gradients(loss, [v.value for v in variables])
            self.optimizer.apply(gradients, variables)
            return {"loss": loss}
        if self.way == "noisy_inputs":
            x += x * tf.random.normal(tf.shape(x), dtype=x.dtype)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = self(x, training=True)
                loss = tf.reduce_mean(tf.square(y - p))
            if self.way in MOVES:
                moved = x + MOVES[self.way](inner.gradient(loss, x))
                loss += tf.reduce_mean(tf.square(y - self(moved, training=True)))
            if self.way == "without words":
                raise NotImplementedError
            if self.way == "root":
                loss = tf.sqrt(loss)
            if self.way == "ratio":
                weight = tf.exp(p) / tf.reduce_mean(tf.exp(p))
                loss = tf.reduce_mean(weight * tf.square(y - p))
            if self.way in REDUCES:
                noise = tf.random.normal(tf.shape(p), dtype=p.dtype)
                loss = REDUCES[self.way](tf.square(y - p + 0.1 * noise))
            if self.way == "noisy_blocks":  # as a GAN's labels of both kinds of rows
                both = tf.concat([p, self(x**2, training=True)], 0)
                noise = tf.random.uniform(tf.shape(both), dtype=p.dtype)
                loss = tf.reduce_mean(tf.square(both - noise))
            if self.way == "noisy_pairs":
                noise = tf.random.normal(tf.shape(x), dtype=p.dtype)
                alike = p @ tf.transpose(self(x + 0.1 * noise, training=True))
                labels = tf.range(tf.shape(x)[0])
                error = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, alike)
                loss = tf.reduce_mean(error)
            if self.way == "noise":
                noise = tf.random.normal(tf.shape(x), dtype=p.dtype)
                loss = tf.reduce_mean(self(noise, training=True) ** 2)
        gradients = tape.gradient(loss, variables)
        if self.way == "clip":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def make(way, rate=0.0, *, normalizes=False, run_eagerly=False):
    """A small model with such a step."""
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.Dropout(rate),
        keras.layers.Dense(1),
    ]
    if normalizes:
        layers.insert(1, keras.layers.BatchNormalization(name="normalizes"))
    model = Steps(layers)
    model.way = way
    how = {"run_eagerly": run_eagerly, "jit_compile": False}
    model.compile(keras.optimizers.SGD(0.1), **how)
    return model


def fit(model, **options):
    """Train on all ranks, and return the warnings of the trial."""
    given = {"batch_size": 24, "batch": "global", "shuffle": False, "verbose": 0}
    with warned("differs from the gradient of the whole by") as texts:
        keras_dist.dist_fit(model, X, Y, **given, **options)
    return texts


CHANGED = [(way, False) for way in ("clip", "ratio", "adversarial", "root")]
CHANGED.append(("root", True))


@pytest.mark.parametrize(
    ("way", "run_eagerly"), shortened(CHANGED, {("clip", False), ("root", True)})
)
def test_a_step_that_ranks_cannot_equal_is_said(world, way, run_eagerly):
    """With a number, once, on the first rank, in a graph and without one."""
    model = make(way, run_eagerly=run_eagerly)
    assert len(fit(model)) == (world.rank == 0 and world.size > 1)
    assert_equal_to_the_bit(model)


class Sparse(keras.regularizers.Regularizer):
    """Compares the mean activity of the batch with a number."""

    def __call__(self, activity):
        return keras.ops.sum(keras.ops.square(keras.ops.mean(activity, 0) - 0.1))


def centered(x):
    return x - keras.ops.mean(x, axis=0, keepdims=True)


def spectrogram():
    """Inputs as sound, whose loudest moment is a maximum over the batch."""
    mel = {"num_mel_bins": 4, "sampling_rate": 100, "min_freq": 5, "dtype": "float32"}
    return keras.Sequential(
        [
            keras.layers.Dense(256),
            keras.layers.MelSpectrogram(64, sequence_stride=32, top_db=5, **mel),
            keras.layers.Flatten(),
        ]
    )


def saved_model():
    """A layer of a function that TensorFlow has saved."""
    module = tf.Module()
    spec = tf.TensorSpec([None, 3], "float64")
    module.serve = tf.function(centered, input_signature=[spec])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        return keras.layers.TFSMLayer(folder, call_endpoint="serve")


WITH_OWN_CODE = {
    "regularizer": lambda: keras.layers.Dense(2, activity_regularizer=Sparse()),
    "activation": lambda: keras.layers.Dense(2, activation=centered),
    "lambda": lambda: keras.layers.Lambda(centered),
    "operation": lambda: centered,
}
COMPARES_ROWS = {
    "mel_spectrogram": spectrogram,
    "softmax": lambda: keras.layers.Softmax(axis=0),
    "unit_normalization": lambda: keras.layers.UnitNormalization(axis=-2),
    "tfsm_layer": saved_model,
}


@pytest.mark.parametrize("way", shortened(WITH_OWN_CODE, {"regularizer"}))
def test_a_function_in_an_object_of_keras_is_tried(world, way):
    """What compares rows may stand in a layer, or in a graph of operations."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(WITH_OWN_CODE[way]()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    assert len(fit(model)) == (world.rank == 0)


@pytest.mark.parametrize("name", COMPARES_ROWS)
def test_a_layer_of_keras_that_compares_rows_is_named(world, name):
    """With how far the gradients of two parts are from those of the batch."""
    keras.utils.clear_session()  # the layers' names are counted
    model = keras.Sequential([keras.Input((3,)), COMPARES_ROWS[name]()])
    model.add(keras.layers.Dense(1, name="last"))
    model.compile("sgd", "mse")
    texts = fit(model)
    assert len(texts) == (world.rank == 0)
    assert all(f"{name}: a row's output may depend on" in text for text in texts)


@pytest.mark.parametrize("name", ["MixUp", "CutMix", "RandomElasticTransform"])
def test_an_augmentation_that_mixes_rows_is_named(world, name):
    """Its numbers are those of one process, and its rows are this rank's alone."""
    keras.utils.clear_session()
    augment = getattr(keras.layers, name)(dtype="float32", name="augment")
    model = keras.Sequential([keras.Input((4, 4, 3)), augment])
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dropout(0.2))
    model.add(keras.layers.Dense(1, dtype="float32"))
    model.compile("sgd", "mse", jit_compile=False)
    x = 255 * RANDOM.uniform(size=(48, 4, 4, 3)).astype("float32")
    given = {"batch": "global", "batch_size": 24, "shuffle": False, "verbose": 0}
    with warned("augment: a row's output may depend on other rows") as texts:
        keras_dist.dist_fit(model, x, x[:, 0, 0, :1], **given)
    assert len(texts) == (world.rank == 0)


@pytest.mark.three_ranks
def test_what_compares_rows_in_later_batches_alone_is_named(world):
    """As a spectrogram does whose loudest row hides no other in the first batch."""
    keras.utils.clear_session()
    inputs = keras.Input((3,))
    loud = keras.layers.Lambda(lambda x: x - keras.ops.maximum(keras.ops.max(x), 9))
    model = keras.Model(inputs, keras.layers.Dense(1)(loud(inputs)))
    model.compile("sgd", "mse")
    x = np.concatenate([X, 1e3 * np.abs(X)])
    with warned("lambda: a row's output may depend on other rows") as texts:
        given = {"batch": "global", "shuffle": False, "verbose": 0}
        keras_dist.dist_fit(model, x, np.tile(Y, (2, 1)), batch_size=12, **given)
    assert len(texts) == (world.rank == 0)


class Labelled(keras.Sequential):
    """Divides by the number of labels, averaged over all ranks."""

    average = staticmethod(keras_dist.average)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            has_label = tf.cast(y > 0, y.dtype)
            count = self.average(tf.reduce_sum(has_label))
            loss = tf.reduce_sum(has_label * tf.square(y - self(x))) / count
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", shortened([False, True], {False}))
def test_a_step_with_a_collective_is_not_tried(world, run_eagerly):
    """The ranks might make different numbers of runs, and wait for ever."""
    y = np.abs(Y)
    y[: 16 : world.size] = 0  # no label in the first third of the first rank's batch

    def make():
        keras.utils.set_random_seed(7)
        model = Labelled([keras.layers.Dense(1)])
        model.compile("sgd", run_eagerly=run_eagerly)
        return model

    def make_plain():
        model = make()
        model.average = tf.identity
        return model

    how = {"batch": "global", "tolerance": 1e-11, "plain_make": make_plain}
    assert_equals_one_process(make, (X, y), 24, **how)


class Counts(keras.Model):
    """Counts errors in `compute_metrics`: a sum over rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.errors = keras.metrics.Mean("errors")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.errors.update_state(tf.reduce_sum(tf.abs(y - y_pred)))
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        positive = tf.reduce_sum(tf.cast(y_pred > 0, tf.int32))
        return logs | {"largest": 2 * tf.reduce_sum(y_pred), "positive": positive}


@pytest.mark.three_ranks
def test_numbers_of_compute_metrics_are_those_of_all_rows():
    """A tracker, and numbers that it adds to the logs: a sum, and a count.

    On three ranks, two have a batch in the last step of the validation.
    """

    def make():
        inputs = keras.Input((3,))
        model = Counts(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
        model.compile("sgd", "mse")
        return model

    how = {"batch": "global", "tolerance": 1e-11, "epochs": 2}
    how |= {"validation_data": (X[:40], Y[:40]), "validation_batch_size": 8}
    assert_equals_one_process(make, (X, Y), 24, **how)


class Spreads(keras.Model):
    """Logs numbers that are no mean and no sum, and a metric by another name."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        spread = tf.reduce_max(y_pred) - tf.reduce_min(y_pred)
        half = tf.reduce_sum(y_pred) / tf.reduce_sum(tf.abs(y_pred))
        gap = logs["auc"] - logs["mae"]
        return {"spread": spread, "half": half, "gap": gap, "area": logs["auc"]}


@pytest.mark.parametrize("run_eagerly", shortened([False, True], {False}))
def test_numbers_of_compute_metrics_that_ranks_average_are_named(world, run_eagerly):
    """With the value of the batch, and the one of its parts; results are not."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1, activation="sigmoid")(inputs)
    model = Spreads(inputs, outputs)
    metrics = [keras.metrics.AUC(name="auc"), "mae"]
    model.compile("sgd", "mse", metrics=metrics, run_eagerly=run_eagerly)
    data = X, (Y > 0).astype("float64")
    with warned("Numbers that the step returns") as texts:
        keras_dist.dist_fit(model, *data, batch_size=24, batch="global", verbose=0)
    assert len(texts) == (world.rank == 0)
    for text in texts:
        assert "spread (0." in text and "gap (" in text and "half" not in text
        assert "area" not in text and " from its parts)" in text


def test_layers_that_normalize_by_the_rows_of_a_rank_are_named_first(world):
    """Their statistics are fixed in the trial."""
    texts = fit(make("clip", normalizes=True), batch_norm="rank")
    assert [text.split(":")[0] for text in texts] == ["normalizes"][world.rank :]


@pytest.mark.parametrize("way", shortened(["", "sign", "graph alone"], {"sign"}))
def test_a_step_that_they_equal_is_not(way):
    """A gradient with respect to inputs, of which only the sign counts, is one.

    So is a sum that only a graph can differentiate.
    """
    with warned("differs from the gradient of the whole") as texts:
        how = {"batch": "global", "tolerance": 1e-11}
        assert_equals_one_process(lambda: make(way), (X, Y), 24, **how)
    assert not texts


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("noisy_sum", "sum"),
        ("noisy_mean", "mean"),
        ("noisy_blocks", "mean"),
        ("noisy_pairs", "neither"),
        ("noise", "mean"),
    ],
)
def test_a_random_sum_is_told_from_a_random_mean(way, kind):
    """By the numbers of the whole batch, also if few rows are normalized."""
    model = make(way, rate=0.5, normalizes=way == "noise")
    rows = 4 if way == "noise" else 48
    assert keras_dist.check_split(model, X[:rows], Y[:rows]).kinds == (kind,)


def test_the_trial_uses_up_no_random_number(world):
    """A rank whose rows are not random tries less."""
    x = X.copy()
    x[: min(len(x), 32) // world.size] = 0  # the first rank's rows of the first batch
    keras_dist.dist_fit(
        make("noisy_inputs"), x, Y, batch="global", shuffle=False, verbose=0
    )
    assert len(set(keras_dist.gather(float(tf.random.uniform([]))))) == 1


def test_check_split_changes_nothing():
    """Weights, optimizer, random numbers and the class of the model are as before."""
    model = make("clip", rate=0.5)
    model.optimizer.build(model.trainable_variables)
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    split = keras_dist.check_split(model, X, Y)
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    assert_same_bits(before, after)
    assert not split.is_exact
    assert max(split.weights.values()) > 0.01
    assert type(model) is Steps
    assert "gradients: neither" in str(split)


@pytest.mark.parametrize(
    ("way", "count", "reason"),
    [("without words", 48, "NotImplementedError"), ("", 1, "the batch has one row")],
)
def test_what_cannot_be_tried_is_an_error_with_the_reason(way, count, reason):
    """As every error of the user's step, also one without a message; and one row."""
    with pytest.raises(ValueError, match=reason):
        keras_dist.check_split(make(way), X[:count], Y[:count])


class Annealed(keras.Sequential):
    """A mean, and a sum whose weight is 0 in the first batches."""

    way, weight, scale = "", None, 0.0

    def call(self, x, training=False):
        """The regularizer's sum over rows, in most ways."""
        p = super().call(x)
        if self.way in ("variable", "vector", "counter", "number"):
            weight = {"number": self.scale}.get(self.way, self.weight)
            weight = tf.reduce_sum(tf.cast(weight, p.dtype)) / 100
            self.add_loss(tf.minimum(weight, 0.1) * tf.reduce_sum(tf.square(p)))
        if self.way == "rows":  # those of the first batches are 0
            self.add_loss(tf.reduce_sum(tf.square(x) * p) / 9)
        if self.way == "counter" and training:
            self.weight.assign_add(1)
        return p

    def train_step(self, data):
        """In one way, the step adds both by itself."""
        if self.way not in ("mixed", "marked"):
            return super().train_step(data)
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x)
            added = tf.reduce_sum(tf.square(p))
            if self.way == "marked":
                added = keras_dist.sum_over_rows(added)
            loss = tf.reduce_mean(tf.square(y - p)) + self.weight / 100 * added
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


class Anneals(keras.callbacks.Callback):
    """Changes the weight: at once if it is one number, else in the second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1 and self.model.way in ("variable", "mixed", "marked"):
            self.model.weight.assign(1.0)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.scale = float(epoch)
        if self.model.way == "vector":
            self.model.weight.assign([epoch, 0])


UNSEEN = ["variable", "vector", "counter", "rows", "number", "mixed", "marked"]


@pytest.mark.parametrize(
    "way", shortened(UNSEEN, {"variable", "vector", "rows", "mixed"})
)
def test_a_sum_that_begins_at_zero_is_found(world, way):
    """Before it counts, if a variable is all that hides it; else when it is seen."""

    def make(way=way):
        keras.utils.set_random_seed(3)
        model = Annealed([keras.Input((3,)), keras.layers.Dense(1)])
        how = {"name": "weight", "trainable": False, "dtype": "float64"}
        values = {"vector": [0.0, 0.0], "counter": np.zeros((), "int64")}
        how["dtype"] = "int64" if way == "counter" else "float64"
        model.way, model.weight = way, keras.Variable(values.get(way, 0.0), **how)
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=way == "number")
        return model

    x = X.copy()
    x[:8] *= way != "rows"
    if way in ("vector", "rows"):
        split = keras_dist.check_split(make(), x[:8], Y[:8])
        assert "1 loss of 0, not seen yet" in str(split)
    how = {"batch": "global", "epochs": 3, "callbacks": [Anneals()]}
    with warned("with weight not 0: the mean of their gradients differs") as texts:
        if way == "mixed":
            keras_dist.dist_fit(make(), x, Y, batch_size=8, verbose=0, **how)
        else:
            plain = {"plain_make": lambda: make("mixed")} if way == "marked" else {}
            assert_equals_one_process(make, (x, Y), 8, tolerance=1e-10, **how, **plain)
    assert len(texts) == (way == "mixed" and world.rank == 0), texts


def test_gradients_of_zero_are_not_seen():
    """They are no mean."""
    model = make("")
    model.layers[-1].kernel.assign(np.zeros((4, 1)))
    split = keras_dist.check_split(model, X, np.zeros((48, 1)))
    assert split.kinds == ("not seen yet",) and not split.is_exact
