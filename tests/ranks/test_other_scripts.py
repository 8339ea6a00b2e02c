"""What scripts of others do around a fit: found by running them, each a claim."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equals_one_process,
    raises_everywhere,
    shortened,
    slow_on_three,
    warned,
)
from harness.data_kinds import Listed
from harness.models import Stepping, make_compiled
from test_patches import make as make_patched
from test_patches import patched

import keras_dist
from keras_dist import mixin


class Retrieval(keras.Sequential):
    """Its loss accepts what Keras passes on as sample weight: `None`, or a tensor."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        """The mean squared error of the one target."""
        weight = 1.0 if sample_weight is None else tf.cast(sample_weight, tf.float32)
        return tf.reduce_mean(tf.square(y["movie"] - y_pred) * weight)


def test_targets_in_a_dict_without_weights(world, rows):
    """A model that handles the sample weights itself is given `None`, as by Keras."""

    def make():
        return Retrieval([keras.layers.Dense(1)])

    x, y = (array[:96] for array in rows)
    assert_equals_one_process(
        lambda: make_compiled(make, keras.optimizers.SGD(0.1), run_eagerly=True),
        (x, {"movie": y[:, None]}),
        12 // world.size,
    )


@pytest.mark.several_ranks
@slow_on_three
def test_arrays_that_differ_are_an_error(world, rows, make_model):
    """An unseeded split has the same shapes on all ranks, and other rows."""
    x, y = rows
    own = np.random.default_rng(world.rank).permutation(len(x))
    fit, evaluate = keras_dist.dist_fit, keras_dist.DistributedModel(make_model())
    weights = np.where(np.arange(len(x)) == 100 * world.rank, 2.0, 1.0)
    frame = tf.constant(x[own])
    calls = {
        "`x`": lambda: fit(make_model(), x[own], y, verbose=0),
        "`y`": lambda: fit(make_model(), x, y[own], verbose=0),
        "`sample_weight`": lambda: fit(
            make_model(), x, y, sample_weight=weights, verbose=0
        ),
        "`validation_data`": lambda: fit(
            make_model(), x, y, validation_data=(frame, y), verbose=0
        ),
        "`x` ": lambda: evaluate.evaluate(x[own], y, verbose=0),
        "`x`  ": lambda: evaluate.predict(x[own], verbose=0),
    }
    for name, call in calls.items():
        named = f"different rows in {name.strip()}"
        raises_everywhere(ValueError, call, named, "Seed what splits", 'shard="none"')
    rounded = x * np.float32(1 + 1e-7 * world.rank)
    fit(make_model(), rounded, y, verbose=0)
    fit(make_model(), x[own], y, shard="none", verbose=0)


@pytest.mark.several_ranks
def test_layers_that_differ_are_an_error(world):
    """What a layer has learned from rows, or drawn, beside its weights."""
    keras.utils.set_random_seed(3)
    words = tf.constant([["ab"], ["cd"], ["ef"]])
    numbers = np.arange(12.0, dtype="float32").reshape(12, 1)
    own = world.rank % 2

    layers = keras.layers
    how = {"output_mode": "multi_hot", "split": None, "standardize": None}
    kinds = {
        "StringLookup": (layers.StringLookup(output_mode="one_hot"), words[own:][:2]),
        "TextVectorization": (layers.TextVectorization(**how), words[own:][:2, 0]),
        "Normalization": (layers.Normalization(axis=None), numbers[own:]),
        "Discretization": (layers.Discretization(num_bins=3), numbers[own * 6 :]),
        "Masked": (Masked(np.array([1.0, own], "float32")), None),
    }
    for kind, (layer, learned) in kinds.items():
        if learned is not None:
            layer.adapt(learned)
        data = words if kind in ("StringLookup", "TextVectorization") else numbers[:3]
        dtype = "string" if data is words else "float32"
        inputs = keras.Input((1,), dtype=dtype)
        hidden = keras.ops.cast(layer(inputs), "float32")
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse", run_eagerly=True)
        y = np.ones((3, 1))

        def fit(model=model, data=data, y=y):
            keras_dist.dist_fit(model, data, y, batch_size=2, verbose=0)

        if kind == "Masked":
            with warned("(Masked) differs") as found:
                fit()
            assert len(found) == int(world.is_first)
        else:
            text = f"({kind}) differs between the ranks"
            raises_everywhere(ValueError, fit, text)


@keras.saving.register_keras_serializable("tests")
class Masked(keras.layers.Layer):
    """Multiplies by a mask that it was made with."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.functions = np.array([lambda x: x])  # cannot be sent, nor compared

    def call(self, x):
        """The inputs, masked."""
        return x * self.mask

    def get_vocabulary(self):
        """A view of a dict, as KerasHub's tokenizers return."""
        return {"a": 1}.keys()


def test_the_rate_of_an_epoch_is_that_of_its_updates(rows, make_model, folder):
    """`ReduceLROnPlateau` sets the rate of the next epoch before it is logged."""
    sgd, how = keras.optimizers.SGD(0.01), {"patience": 1, "min_delta": 100.0}
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, **how),
        keras.callbacks.TensorBoard(f"{folder}/board"),
    ]
    given = {"epochs": 4, "lr_scaling": "none", "verbose": 0, "callbacks": callbacks}
    logs = keras_dist.dist_fit(make_model(sgd), *rows, **given).history
    assert logs["effective_learning_rate"] == pytest.approx(logs["learning_rate"])
    assert len(set(np.round(logs["learning_rate"], 9))) > 1


@pytest.mark.two_ranks
@pytest.mark.parametrize("first", shortened(range(4), {0}))
def test_every_replacement_is_taken_back_whichever_fails(rows, monkeypatch, first):
    """Each of them fails in turn, with the others made before or after it."""
    x, y = rows
    failed = 0
    for name in ("add", "replace_method"):
        plain = getattr(mixin, name)
        for fails_at in range(first, 100, 4):
            calls = iter(range(1000))

            def failing(*args, plain=plain, calls=calls, fails_at=fails_at):
                if next(calls) == fails_at:
                    raise OSError("no coffee")
                return plain(*args)

            model = make_patched()
            model.run_eagerly = True
            before = patched(model)
            monkeypatch.setattr(mixin, name, failing)
            try:
                keras_dist.dist_fit(model, x[:16], y[:16], verbose=0, lr_scaling=2.0)
            except (OSError, RuntimeError) as error:
                assert "no coffee" in str(error)
                failed += 1
                is_over = False
            else:
                is_over = True
            finally:
                monkeypatch.setattr(mixin, name, plain)
            assert patched(model) == before, (name, fails_at)
            if is_over:
                break
    assert failed > 1


def shuffled(rows, batch_size, kind):
    """Rows that each pass has in another order, made as a script makes them."""
    keras.utils.set_random_seed(11)
    x, y = rows
    count = 99 if kind == "left over" else 96
    data = tf.data.Dataset.from_tensor_slices((x[:count], y[:count]))
    data = data.shuffle(96, seed=5)
    if kind == "unknown length":
        data = data.filter(lambda x, y: tf.reduce_all(x < 1e9))
    if kind == "two shuffles":
        data = data.map(lambda x, y: (x * 2, y)).shuffle(10)  # the global seed's
    data = data.batch(batch_size)
    return data.cache().prefetch(2) if kind == "cache" else data.prefetch(2)


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "kind",
    shortened(
        ["known", "unknown length", "left over", "two shuffles", "cache"],
        {"unknown length"},
    ),
)
def test_a_seeded_shuffle_has_the_order_of_one_process(world, rows, make_model, kind):
    """From the first epoch on, in a second fit, and in an evaluation before it."""
    losses = []
    ours = keras_dist.DistributedModel(make_model(), lr_scaling="none")
    for model, batch_size in ((ours, 8), (make_model(), 8 * world.size)):
        data = shuffled(rows, batch_size, kind)
        validation = shuffled((rows[0][::-1], rows[1][::-1]), batch_size, kind)
        given = {"validation_data": validation, "epochs": 2, "verbose": 0}
        found = [model.evaluate(data, verbose=0)[0]]
        for _ in range(2):
            logs = model.fit(data, **given).history
            found += logs["loss"] + logs["val_loss"]
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.several_ranks
@pytest.mark.parametrize("has_seed", [False, True])
def test_a_shuffle_that_differs_between_the_ranks_warns(
    world, rows, make_model, has_seed
):
    """The same rows in another order on each rank; in validation an error."""
    tf.random.set_seed(world.rank)  # as it is where a script sets no seed
    data = tf.data.Dataset.from_tensor_slices(rows)
    data = data.shuffle(200, seed=world.rank + 1 if has_seed else None).batch(10)
    with warned("come twice") as found:
        keras_dist.dist_fit(make_model(), data, verbose=0)
    assert len(found) == int(world.is_first)
    assert all("pass `seed` to `shuffle`" in text for text in found)
    if has_seed:

        def validate():
            how = {"validation_data": data, "verbose": 0}
            keras_dist.dist_fit(make_model(), *rows, **how)

        raises_everywhere(ValueError, validate, "validation batches differ")


class Tracked(Stepping):
    """Logs its loss by a tracker."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="tracked")

    def report(self, loss):
        """The loss of all steps of the epoch."""
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


class Noisy(Tracked):
    """Adds to its batch an array of as many rows, as generative models do.

    Args:
        batch_size: Rows of the array; `None` for as many as the batch has, of which
            each ten repeat themselves.
    """

    def __init__(self, batch_size, kind):
        super().__init__()
        self.kind, self.batch_size = kind, batch_size
        self.hidden, self.out = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, x):
        """One number for each row."""
        return self.out(self.hidden(x))

    def loss_of(self, data):
        """The loss of what is a mean, or divided by another number."""
        x, y = data
        rows = self.batch_size or tf.shape(x)[0]
        noise = tf.cast(tf.range(rows) % 10, x.dtype)[:, None] / 10
        weight = tf.cast(x[:, :1] > -1, x.dtype)
        error = tf.square(self(x + noise) - y[:, None])
        if self.kind != "masked":
            return tf.reduce_mean(error)
        # A step whose rows are a constant cannot be tried on parts of a batch.
        if self.batch_size:
            return keras_dist.weighted_mean(error, weight)
        return tf.reduce_sum(error * weight) / tf.reduce_sum(weight)


def in_batches(rows, batch_size, *, drop=False):
    """50 rows in batches: of 10 rows, they are 5, and one is left over."""
    data = tf.data.Dataset.from_tensor_slices(tuple(array[:50] for array in rows))
    return data.batch(batch_size, drop_remainder=drop).prefetch(1)


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "kind",
    [pytest.param("mean", marks=pytest.mark.three_ranks)] + shortened(["masked"], ()),
)
def test_batches_that_cannot_be_cut_go_whole_to_one_rank(rows, kind):
    """Noise of a constant shape fits them, and no row is left out or counted twice."""

    def make(rows):
        return make_compiled(lambda: Noisy(rows, kind), keras.optimizers.Adam(0.01))

    with warned("cannot be seen from the graph") as texts:
        assert_equals_one_process(
            lambda: make(10),
            lambda size: in_batches(rows, size, drop=True),
            10,
            plain_make=lambda: make(None),
            plain_data=lambda size: in_batches(rows, size),
            epochs=2,
            tolerance=2e-5,
        )
    assert not texts


class OfMolecules(keras.Model):
    """A number for each molecule of a batch that is one graph."""

    def __init__(self):
        super().__init__()
        self.atoms, self.out = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, x):
        """Sums over the atoms of each molecule."""
        atoms, owner = x
        return self.out(tf.math.segment_sum(self.atoms(atoms), owner))


def merged(batch_size):
    """Batches of molecules of 1 to 5 atoms; their tensors differ in length."""
    random = np.random.default_rng(1)
    counts = np.arange(22) % 5 + 1
    atoms = random.normal(size=(counts.sum(), 3)).astype("float32")
    y = random.normal(size=(len(counts), 1)).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(atoms, counts)
    data = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(batch_size)
    return data.map(lambda x, y: ((x.merge_dims(0, 1), x.value_rowids()), y))


@pytest.mark.several_ranks
@slow_on_three
def test_batches_whose_tensors_differ_in_length(world, capsys):
    """They are whole, in training and in validation, and weigh by their targets.

    A line says that the first rank has all of a global batch.
    """

    def make():
        adam = keras.optimizers.Adam(0.01)
        return make_compiled(OfMolecules, adam, "mse", metrics=["mae"])

    def data(rows):
        return {"x": merged(rows), "validation_data": merged(rows * 3 // 2)}

    # Not the losses: Keras weighs batches by their atoms.
    how = {"epochs": 2, "tolerance": 2e-5, "logs": ("mae", "val_mae")}
    assert_equals_one_process(make, data, 2, **how)
    keras_dist.dist_fit(make(), merged(4), verbose=2, batch="global")
    is_said = "batches: each on the first rank alone" in capsys.readouterr().out
    assert is_said == (world.rank == 0)


class OfPairs(Tracked):
    """Metric learning: an anchor and a positive example of each class, in one array."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def loss_of(self, data):
        """Keras's example has one pair of arrays; the oracle has several of them."""
        x = data[0] if isinstance(data, tuple) else data
        pairs = x if x.shape.rank == 4 else x[tf.newaxis]
        anchors, positives = self.dense(pairs[:, 0]), self.dense(pairs[:, 1])
        alike = tf.matmul(anchors, positives, transpose_b=True)
        labels = tf.broadcast_to(tf.range(3), tf.shape(alike)[:2])
        error = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, alike)
        return tf.reduce_mean(error)


@pytest.mark.several_ranks
@slow_on_three
def test_a_single_array_is_not_cut(world):
    """Its first axis is two examples of each class, which have to stay together."""
    pairs = np.random.default_rng(3).normal(size=(world.size + 1, 2, 3, 5))
    pairs = pairs.astype("float32")

    def make():
        return make_compiled(OfPairs, keras.optimizers.SGD(0.1))

    def data(rows):
        some = [pairs[: world.size], pairs[world.size :]]
        return Listed(list(pairs) if rows == 1 else some)

    assert_equals_one_process(make, data, 1, epochs=2, tolerance=2e-5, logs=())
