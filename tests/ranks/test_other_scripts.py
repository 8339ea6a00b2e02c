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
from keras_dist.training import losses


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

            def failing(*args, plain=plain, calls=calls, fails_at=fails_at):
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
