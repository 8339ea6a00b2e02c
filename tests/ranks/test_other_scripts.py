"""What scripts of others do around a fit: found by running them, each a claim."""

import json
import signal
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import largest_difference, raises_everywhere
from test_patches import make as make_patched
from test_patches import patched

import keras_dist
from keras_dist import mixin
from keras_dist.checkpoint import save_request
from keras_dist.training import losses, same_values


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
        model.compile(keras.optimizers.SGD(0.1))
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
    disk = Counted(folder / "x", "float32", "w+", shape=(2**19, 1024))
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


@pytest.mark.several_ranks
def test_an_unseeded_shuffle_warns(world, rows, make_model):
    """Rows that are left out are worth more than half a line of the plan."""
    tf.random.set_seed(world.rank)  # as it is where a script sets no seed
    data = tf.data.Dataset.from_tensor_slices(rows).shuffle(200).batch(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_dist.dist_fit(make_model(), data, verbose=0)
    found = [str(each.message) for each in caught if "come twice" in str(each.message)]
    assert len(found) == int(world.is_first)
    assert all("pass `seed` to `shuffle`" in text for text in found)


def test_the_rate_of_an_epoch_is_that_of_its_updates(rows, make_model, tmp_path):
    """`ReduceLROnPlateau` sets the rate of the next epoch before reports are made."""
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
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras_dist.Report(f"{folder}/run.json"),
        ],
    )
    keras_dist.comm.run_on_all(lambda: None)
    with open(f"{folder}/log.csv") as file:
        names, *lines = (line.strip().split(",") for line in file)
    logged = [float(line[names.index("learning_rate")]) for line in lines]
    with open(f"{folder}/run.json") as file:
        epochs = json.load(file)["epochs"]
    shown = [epoch["rates"]["effective_learning_rate"] for epoch in epochs]
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
    makers = [(mixin, "add"), (losses, "_replaced"), (save_request.signal, "signal")]
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


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    "kind", ["known", "unknown length", "left over", "two shuffles", "cache"]
)
def test_a_seeded_shuffle_has_the_order_of_one_process(world, rows, make_model, kind):
    """From the first epoch on, in a second fit, and in an evaluation before it."""
    losses = []
    for batch_size in (4, 4 * world.size):
        data = shuffled(rows, batch_size, kind)
        validation = shuffled((rows[0][::-1], rows[1][::-1]), batch_size, kind)
        model = make_model()
        is_plain = batch_size == 4 * world.size and losses
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
def test_a_seeded_shuffle_goes_on_after_a_resume(world, rows, make_model, tmp_path):
    """The order of epoch k is that of a training that was never ended."""
    folder = keras_dist.broadcast(str(tmp_path))
    histories = []
    for parts in ([4], [2, 4]):
        for epochs in parts:
            history = keras_dist.dist_fit(
                make_model(),
                shuffled(rows, 4, "known"),
                epochs=epochs,
                verbose=0,
                resume=f"{folder}/{len(parts)}",
            ).history
        histories.append(history["loss"][-2:])
    assert histories[0] == pytest.approx(histories[1], rel=1e-6)


@pytest.mark.several_ranks
def test_other_seeds_on_each_rank_warn(world, rows, make_model):
    """The same rows in another order on each rank; in validation an error."""

    def data(seed):
        rows_of = tf.data.Dataset.from_tensor_slices(rows)
        return rows_of.shuffle(200, seed=seed).batch(10)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras_dist.dist_fit(make_model(), data(world.rank + 1), verbose=0)
    found = [each for each in caught if "come twice" in str(each.message)]
    assert len(found) == int(world.is_first)

    def validate():
        keras_dist.dist_fit(
            make_model(),
            *rows,
            validation_data=data(world.rank + 1),
            verbose=0,
        )

    for message in raises_everywhere(ValueError, validate):
        assert "validation batches differ" in message
