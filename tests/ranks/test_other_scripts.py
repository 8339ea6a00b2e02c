"""What scripts of others do around a fit: found by running them, each a claim."""

import signal
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import (
    assert_equal_to_the_bit,
    largest_difference,
    raises_everywhere,
)
from data_kinds import Sequence
from test_patches import make as make_patched
from test_patches import patched

import keras_dist
from keras_dist import mixin
from keras_dist.checkpoint import saver
from keras_dist.training import same_values


def two_outputs():
    """A model with a dict of two outputs, compiled."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), {"a": "mse", "b": "mae"})
    return model


class Retrieval(keras.Model):
    """Its loss accepts what Keras passes on as sample weight: `None`, or a tensor."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        """One number for each row."""
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        """The mean squared error of the one target."""
        weight = 1.0 if sample_weight is None else tf.cast(sample_weight, tf.float32)
        return tf.reduce_mean(tf.square(y["movie"] - y_pred) * weight)


def test_targets_in_a_dict_without_weights(world, rows):
    """A model that handles the sample weights itself is given `None`, as by Keras."""
    x, y = rows
    trained = []
    for fit in (keras_dist.dist_fit, keras.Model.fit):
        keras.utils.set_random_seed(3)
        model = Retrieval()
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        size = world.size if fit is keras.Model.fit else 1
        options = {} if fit is keras.Model.fit else {"lr_scaling": "none"}
        targets = {"movie": y[:, None]}
        fit(
            model,
            x[:96],
            {"movie": targets["movie"][:96]},
            batch_size=12 // world.size * size,
            shuffle=False,
            verbose=0,
            **options,
        )
        trained.append(model)
    assert largest_difference(*trained) < 1e-5


def test_class_weights_of_two_outputs(rows):
    """Keras's own error says that they need a single output."""
    x, y = rows
    targets = {"a": y, "b": y}
    expected = None
    try:
        two_outputs().fit(x, targets, class_weight={0: 1.0, 1: 2.0}, verbose=0)
    except ValueError as error:
        expected = str(error)
    assert expected is not None and "single output" in expected
    for message in raises_everywhere(
        ValueError,
        lambda: keras_dist.dist_fit(
            two_outputs(), x, targets, class_weight={0: 1.0, 1: 2.0}, verbose=0
        ),
    ):
        assert expected in message


@pytest.mark.three_ranks
@pytest.mark.several_ranks
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
        for message in raises_everywhere(ValueError, call):
            assert f"different rows in {name.strip()}" in message
            assert "Seed what splits" in message and 'shard="none"' in message
    rounded = x * np.float32(1 + 1e-7 * world.rank)
    fit(make_model(), rounded, y, verbose=0)
    fit(make_model(), x[own], y, shard="none", verbose=0)


class Counted(np.memmap):
    """Counts the rows that are read."""

    count = 0

    def __getitem__(self, index):
        """One row, or more."""
        Counted.count += np.size(np.arange(len(self))[index])
        return super().__getitem__(index)


@pytest.mark.several_ranks
def test_comparing_a_large_array_reads_a_part_of_it(world, tmp_path):
    """Of a file, a few hundred rows."""
    folder = tmp_path / str(world.rank)
    folder.mkdir(exist_ok=True)
    disk = Counted(folder / "x", "float32", "w+", shape=(2**16, 1024))
    Counted.count = 0
    same_values.agree_on_arrays({"x": disk})
    assert 0 < Counted.count <= 256


@pytest.mark.several_ranks
def test_layers_that_differ_are_an_error(world):
    """What a layer has learned from rows, or drawn, beside its weights."""
    keras.utils.set_random_seed(3)
    words = tf.constant([["ab"], ["cd"], ["ef"]])
    numbers = np.arange(12.0, dtype="float32").reshape(12, 1)
    own = world.rank % 2

    def adapted(layer, data):
        layer.adapt(data)
        return layer

    kinds = {
        "StringLookup": lambda: adapted(
            keras.layers.StringLookup(output_mode="one_hot"), words[own : own + 2]
        ),
        "TextVectorization": lambda: adapted(
            keras.layers.TextVectorization(
                output_mode="multi_hot", split=None, standardize=None
            ),
            words[own : own + 2, 0],
        ),
        "Normalization": lambda: adapted(
            keras.layers.Normalization(axis=None), numbers[own:]
        ),
        "Discretization": lambda: adapted(
            keras.layers.Discretization(num_bins=3), numbers[own * 6 :]
        ),
        "Masked": lambda: Masked(np.array([1.0, own], "float32")),
    }
    for kind, make in kinds.items():
        data = words if kind in ("StringLookup", "TextVectorization") else numbers[:3]
        dtype = "string" if data is words else "float32"
        inputs = keras.Input((1,), dtype=dtype)
        hidden = keras.ops.cast(make()(inputs), "float32")
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse", run_eagerly=True)
        y = np.ones((3, 1))

        def fit(model=model, data=data, y=y):
            keras_dist.dist_fit(model, data, y, batch_size=2, verbose=0)

        if kind == "Masked":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit()
            found = [each for each in caught if "(Masked) differs" in str(each.message)]
            assert len(found) == int(world.is_first)
        else:
            for message in raises_everywhere(ValueError, fit):
                assert f"({kind}) differs between the ranks" in message


@keras.saving.register_keras_serializable("tests")
class Masked(keras.layers.Layer):
    """Multiplies by a mask that it was made with."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def call(self, x):
        """The inputs, masked."""
        return x * self.mask


def test_the_rate_of_an_epoch_is_that_of_its_updates(rows, make_model, tmp_path):
    """`ReduceLROnPlateau` sets the rate of the next epoch before it is logged."""
    folder = keras_dist.broadcast(str(tmp_path))
    reduce = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.1, patience=1, min_delta=100.0
    )
    keras_dist.dist_fit(
        make_model(keras.optimizers.SGD(0.01)),
        *rows,
        epochs=4,
        lr_scaling="none",
        verbose=0,
        callbacks=[
            reduce,
            keras.callbacks.TensorBoard(f"{folder}/board"),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        ],
    )
    with keras_dist.comm.together():
        pass
    with open(f"{folder}/log.csv") as file:
        names, *lines = (line.strip().split(",") for line in file)
    logged, shown = (
        [float(line[names.index(name)]) for line in lines]
        for name in ("learning_rate", "effective_learning_rate")
    )
    assert shown == pytest.approx(logged)
    assert len(set(np.round(logged, 9))) > 1


@pytest.mark.several_ranks
def test_a_method_that_keras_lacks(rows, monkeypatch):
    """What was replaced before it is taken back, as in a Keras of another version."""
    name = "_aggregate_additional_loss"
    owners = [cls for cls in keras.Model.__mro__ if name in vars(cls)]
    before = keras.losses.Loss.__call__, tf.GradientTape.gradient
    model = make_patched()
    for owner in owners:
        monkeypatch.delattr(owner, name)
    with pytest.raises(AttributeError, match=name):
        keras_dist.dist_fit(model, *rows, verbose=0)
    assert (keras.losses.Loss.__call__, tf.GradientTape.gradient) == before


@pytest.mark.two_ranks
def test_every_replacement_is_taken_back_whichever_fails(rows, tmp_path, monkeypatch):
    """Each of them fails in turn, with the others made before or after it."""
    folder = keras_dist.broadcast(str(tmp_path))
    x, y = rows
    makers = [
        (mixin, "add"),
        (mixin, "_redirect"),
        (saver.signal, "signal"),
    ]
    failed = 0
    for owner, name in makers:
        plain = getattr(owner, name)
        for fails_at in range(100):
            calls = iter(range(1000))

            def failing(*args, name=name, plain=plain, calls=calls, fails_at=fails_at):
                is_undone = name == "signal" and not hasattr(args[1], "__self__")
                if not is_undone and next(calls) == fails_at:
                    raise OSError("no coffee")
                return plain(*args)

            model = make_patched()
            model.run_eagerly = True
            before = patched(model)
            monkeypatch.setattr(owner, name, failing)
            try:
                keras_dist.dist_fit(
                    model,
                    x[:16],
                    y[:16],
                    verbose=0,
                    lr_scaling=2.0,
                    resume=f"{folder}/{name}{fails_at}",
                )
            except (OSError, RuntimeError) as error:
                assert "no coffee" in str(error)
                failed += 1
                is_over = False
            else:
                is_over = True
            finally:
                monkeypatch.setattr(owner, name, plain)
            assert patched(model) == before, (name, fails_at)
            assert signal.getsignal(signal.SIGTERM) == before["handler of SIGTERM"]
            if is_over:
                break
    assert failed > 5


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
    [
        pytest.param("known", marks=pytest.mark.long),
        "unknown length",
        pytest.param("left over", marks=pytest.mark.three_ranks),
        pytest.param("two shuffles", marks=pytest.mark.long),
        pytest.param("cache", marks=pytest.mark.long),
    ],
)
def test_a_seeded_shuffle_has_the_order_of_one_process(world, rows, make_model, kind):
    """From the first epoch on, in a second fit, and in an evaluation before it."""
    losses = []
    for batch_size in (8, 8 * world.size):
        data = shuffled(rows, batch_size, kind)
        validation = shuffled((rows[0][::-1], rows[1][::-1]), batch_size, kind)
        model = make_model()
        is_plain = batch_size == 8 * world.size and losses
        many = model if is_plain else keras_dist.DistributedModel(model)
        options = {} if is_plain else {"lr_scaling": "none"}
        found = [many.evaluate(data, verbose=0)[0]]
        for _ in range(2):
            history = many.fit(
                data, validation_data=validation, epochs=2, verbose=0, **options
            )
            found += history.history["loss"] + history.history["val_loss"]
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_dist.dist_fit(make_model(), data, verbose=0)
    found = [str(each.message) for each in caught if "come twice" in str(each.message)]
    assert len(found) == int(world.is_first)
    assert all("pass `seed` to `shuffle`" in text for text in found)
    if has_seed:

        def validate():
            how = {"validation_data": data, "verbose": 0}
            keras_dist.dist_fit(make_model(), *rows, **how)

        for message in raises_everywhere(ValueError, validate):
            assert "validation batches differ" in message


class Noisy(keras.Model):
    """Adds to its batch an array of as many rows, as generative models do.

    Args:
        batch_size: Rows of the array; `None` for as many as the batch has, of which
            each ten repeat themselves.
    """

    def __init__(self, batch_size, kind):
        super().__init__()
        self.kind, self.batch_size = kind, batch_size
        if kind == "embedding":
            self.hidden = keras.layers.Embedding(7, 4)
        else:
            self.hidden = keras.layers.Dense(4, use_bias=kind != "norm")
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.out = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, x, training=None):
        """One number for each row."""
        if self.kind == "embedding":
            x = self.hidden(tf.cast(x[:, :3] > 0, tf.int32) * 2)
            x = tf.reduce_mean(x, axis=1)
        else:
            x = self.hidden(x)
        if self.kind == "norm":
            x = self.norm(x, training=training)
        return self.out(x)

    def train_step(self, data):
        """The loss of what is a mean, or divided by another number."""
        x, y = data
        rows = self.batch_size or tf.shape(x)[0]
        noise = tf.cast(tf.range(rows) % 10, x.dtype)[:, None] / 10
        weight = tf.cast(x[:, :1] > -1, x.dtype)
        with tf.GradientTape() as tape:
            error = tf.square(self(x + noise, training=True) - y[:, None])
            # A step whose rows are a constant cannot be tried on parts of a batch.
            if self.kind == "masked" and self.batch_size:
                loss = keras_dist.weighted_mean(error, weight)
            elif self.kind == "masked":
                loss = tf.reduce_sum(error * weight) / tf.reduce_sum(weight)
            else:
                loss = tf.reduce_mean(error)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


def in_batches(rows, batch_size, source, *, drop=True):
    """50 rows in batches: of 10 rows, they are 5, and one is left over."""
    x, y = rows[0][:50], rows[1][:50]
    if source == "dataset":
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.batch(batch_size, drop_remainder=drop).prefetch(1)
    if source == "unknown length":
        data = in_batches(rows, batch_size, "dataset", drop=drop)
        return data.filter(lambda x, y: True)
    if source == "generator":
        count = -(-50 // batch_size)
        spans = [slice(n * batch_size, (n + 1) * batch_size) for n in range(count)]
        return ((x[span], y[span]) for span in spans * 2)
    return Sequence(x, y, [batch_size])


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        pytest.param("mean", "dataset", marks=pytest.mark.three_ranks),
        pytest.param("mean", "sequence", marks=pytest.mark.long),
        ("masked", "dataset"),
        pytest.param("embedding", "dataset", marks=pytest.mark.long),
        pytest.param(
            *("norm", "dataset"),
            marks=[pytest.mark.three_ranks, pytest.mark.slow_on_three],
        ),
    ],
)
def test_batches_that_cannot_be_cut_go_whole_to_one_rank(world, rows, kind, source):
    """Noise of a constant shape fits them, and no row is left out or counted twice."""
    trained = []
    for batch_size in (10, None):
        keras.utils.set_random_seed(3)
        model = Noisy(batch_size, kind)
        model.compile(keras.optimizers.Adam(0.01))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if batch_size is None:
                size = 10 * world.size
                data = in_batches(rows, size, "dataset", drop=False)
                history = model.fit(data, epochs=2, shuffle=False, verbose=0)
            else:
                history = keras_dist.dist_fit(
                    model,
                    in_batches(rows, batch_size, source),
                    epochs=2,
                    shuffle=False,
                    verbose=0,
                    lr_scaling="none",
                )
        texts = [str(each.message) for each in caught]
        assert not [text for text in texts if "cannot be seen from the graph" in text]
        trained.append((model, history.history["tracked"]))
    (model, logged), (oracle, expected) = trained
    assert int(model.optimizer.iterations) == int(oracle.optimizer.iterations)
    assert largest_difference(model, oracle) < 2e-5
    assert logged == pytest.approx(expected, rel=1e-5)
    assert_equal_to_the_bit(model)


class OfMolecules(keras.Model):
    """A number for each molecule of a batch that is one graph."""

    def __init__(self):
        super().__init__()
        self.atoms, self.out = keras.layers.Dense(4), keras.layers.Dense(1)

    def call(self, x):
        """Sums over the atoms of each molecule."""
        atoms, owner = x
        return self.out(tf.math.segment_sum(self.atoms(atoms), owner))


def merged(batch_size, *, is_shuffled, makes_sequence=False):
    """Batches of molecules of 1 to 5 atoms; their tensors differ in length."""
    random = np.random.default_rng(1)
    counts = np.arange(22) % 5 + 1
    atoms = random.normal(size=(counts.sum(), 3)).astype("float32")
    y = random.normal(size=(len(counts), 1)).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(atoms, counts)

    def as_one_graph(x, y):
        return (x.merge_dims(0, 1), x.value_rowids()), y

    keras.utils.set_random_seed(5)
    data = tf.data.Dataset.from_tensor_slices((ragged, y))
    data = data.shuffle(30, seed=2) if is_shuffled else data
    data = data.batch(batch_size).map(as_one_graph)
    return list(data.as_numpy_iterator()) if makes_sequence else data


class Listed(keras.utils.PyDataset):
    """Batches of a list."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("dataset", marks=pytest.mark.three_ranks),
        pytest.param("shuffled", marks=pytest.mark.long),
        pytest.param("sequence", marks=pytest.mark.long),
    ],
)
def test_batches_whose_tensors_differ_in_length(world, source):
    """They are whole, in training and in validation, and weigh by their targets."""
    trained = []
    for size in (1, world.size):
        is_shuffled = source == "shuffled"
        data = merged(2 * size, is_shuffled=is_shuffled)
        validation = merged(3 * size, is_shuffled=False)
        if source == "sequence" and not trained:
            data = Listed(merged(2 * size, is_shuffled=False, makes_sequence=True))
        keras.utils.set_random_seed(3)
        model = OfMolecules()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        fit = keras.Model.fit if trained else keras_dist.dist_fit
        options = {} if trained else {"lr_scaling": "none"}
        history = fit(
            model,
            data,
            validation_data=validation,
            epochs=2,
            shuffle=False,
            verbose=0,
            **options,
        )
        trained.append((model, history.history))
    (model, logged), (oracle, expected) = trained
    assert largest_difference(model, oracle) < 2e-5
    # Not the losses: Keras weighs those of batches by their atoms.
    for name in ("mae", "val_mae"):
        assert logged[name] == pytest.approx(expected[name], rel=1e-5), name
    assert_equal_to_the_bit(model)


@pytest.mark.several_ranks
@pytest.mark.parametrize("source", ["dataset", "unknown length"])
def test_left_over_batches_have_the_weights_of_their_classes(
    world, rows, make_model, source
):
    """One batch is left over: the weights of one process with the global batch."""
    count, weights = 50 // (world.size * 2 + 1), {0: 0.3, 1: 2.0}
    total = count * (world.size * 2 + 1)
    arrays = [array[:total] for array in rows]
    model, oracle = make_model(), make_model()
    options = {"class_weight": weights, "epochs": 2, "verbose": 0, "shuffle": False}
    data = in_batches(arrays, count, source, drop=False)
    keras_dist.dist_fit(model, data, lr_scaling="none", **options)
    size = count * world.size
    oracle.fit(in_batches(arrays, size, "dataset", drop=False), **options)
    assert int(model.optimizer.iterations) == int(oracle.optimizer.iterations) == 6
    assert largest_difference(model, oracle) < 1e-5
    assert_equal_to_the_bit(model)


class Augments(keras.Model):
    """Changes a variable in its step, by what it sees in the batch."""

    def __init__(self, *, is_weight=False):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        if is_weight:
            self.p = self.add_weight(shape=(), initializer="zeros", trainable=False)
        else:
            self.p = tf.Variable(0.0, trainable=False)

    def call(self, x):
        """One number for each row."""
        return self.dense(x)

    def train_step(self, data):
        """Keras's own step, and what an augmentation learns of its batch."""
        logs = super().train_step(data)
        step = tf.reduce_mean(tf.sign(data[0][:, 0])) / 50
        self.p.assign(tf.clip_by_value(self.p + step, -1.0, 1.0))
        return logs


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_raw_variable_is_named_by_a_warning(world, rows, is_compiled):
    """Each rank has its own; one that is a weight is averaged, as before."""
    x, y = rows[0][:96], rows[1][:96]
    for is_weight in (False, True):
        model = Augments(is_weight=is_weight)
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=is_compiled)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keras_dist.dist_fit(model, x, y, batch_size=12, shuffle=False, verbose=0)
        found = [str(one.message) for one in caught if "own value" in str(one.message)]
        if is_weight or not world.is_first:
            assert found == []
        else:
            assert len(found) >= 1 and "augments" in found[0] and ".p" in found[0]


@pytest.mark.several_ranks
def test_the_plan_says_how_many_rows_a_batch_has(world, rows, make_model, capsys):
    """Of batched data too, where that is known."""
    for data in (
        in_batches(rows, 10, "dataset", drop=False),
        in_batches(rows, 10, "sequence"),
        in_batches(rows, 10, "generator"),
    ):
        keras_dist.dist_fit(make_model(), data, verbose=2)
        printed = capsys.readouterr().out
        if world.is_first:
            assert f"10 rows per rank, {10 * world.size} global" in printed


class OfPairs(keras.Model):
    """Metric learning: an anchor and a positive example of each class, in one array."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, data):
        """Keras's example has one pair of arrays; the oracle has several of them."""
        x = data[0] if isinstance(data, tuple) else data
        pairs = x if x.shape.rank == 4 else x[tf.newaxis]
        labels = tf.range(3)
        with tf.GradientTape() as tape:
            anchors, positives = self.dense(pairs[:, 0]), self.dense(pairs[:, 1])
            alike = tf.matmul(anchors, positives, transpose_b=True)
            error = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.broadcast_to(labels, tf.shape(alike)[:2]), alike
            )
            loss = tf.reduce_mean(error)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


@pytest.mark.several_ranks
@pytest.mark.three_ranks
def test_a_single_array_is_not_cut(world):
    """Its first axis is two examples of each class, which have to stay together."""
    pairs = np.random.default_rng(3).normal(size=(world.size + 1, 2, 3, 5))
    pairs = pairs.astype("float32")
    trained = []
    for is_plain in (False, True):
        keras.utils.set_random_seed(3)
        model = OfPairs()
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=is_plain)
        if is_plain:
            batches = [pairs[: world.size], pairs[world.size :]]
            model.fit(Listed(batches), shuffle=False, epochs=2, verbose=0)
        else:
            data = Listed(list(pairs))
            keras_dist.dist_fit(
                model, data, shuffle=False, epochs=2, lr_scaling="none", verbose=0
            )
        trained.append(model)
    assert largest_difference(*trained) < 2e-5
    assert_equal_to_the_bit(trained[0])
