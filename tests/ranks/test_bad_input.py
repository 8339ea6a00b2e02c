"""Input that would make the ranks diverge is an error on all, before training."""

import contextlib
import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import assert_equals_one_process, raises_everywhere

import keras_dist
from keras_dist.optimizer import reduce


def fit(model, *args, **kwargs):
    """A call that the tests expect to fail."""
    return lambda: keras_dist.dist_fit(model, *args, verbose=0, **kwargs)


@pytest.mark.three_ranks
@pytest.mark.several_ranks
def test_unusable_models_and_too_few_rows(world, make_model, rows):
    """Not a model, or not compiled; a rank without a row could take no step."""
    model, plain = make_model(), keras.Sequential([keras.layers.Dense(1)])
    none, few, nine = (
        (np.zeros((count, 5)), np.zeros(count)) for count in (0, world.size - 1, 9)
    )
    for kind, call, text in (
        (TypeError, fit("model", *rows), "must be a keras.Model"),
        (ValueError, fit(plain, *rows), "model.compile"),
        (ValueError, fit(model), "There is no data to train on"),
        (ValueError, fit(model, *none), "There is no data to train on"),
        (ValueError, fit(model, *few), f"{world.size - 1} rows for {world.size} ranks"),
        (ValueError, fit(model, *nine, validation_data=none), "nothing to validate on"),
    ):
        raises_everywhere(kind, call, text)


@pytest.mark.several_ranks
def test_stateful_layers_in_a_global_batch(world):
    """Their state is of the global batch; each rank has a part of its rows."""
    layer = keras.layers.Bidirectional(keras.layers.LSTM(4, stateful=True))
    model = keras.Sequential([keras.Input(batch_shape=(6, 5, 3)), layer])
    model.compile("sgd", "mse")
    given = np.zeros((12, 5, 3)), np.zeros((12, 8))
    texts = "stateful=True: ['bidirectional", 'batch="rank", shuffle=False'
    raises_everywhere(ValueError, fit(model, *given, batch="global"), *texts)


@pytest.mark.several_ranks
def test_stateful_layers_in_a_batch_of_each_rank(world):
    """They equal one process: a row has its place in the batch, on the same rank."""
    random, count = np.random.default_rng(0), 20 * world.size
    x, y = random.normal(size=(count, 5, 3)), random.normal(size=(count, 4))

    def make(rows):
        keras.utils.set_random_seed(1)
        layer = keras.layers.LSTM(4, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(rows, 5, 3)), layer])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    how = {"batch": "rank", "options": {"lr_scaling": "none"}, "epochs": 2}
    makes = {"plain_make": partial(make, 4 * world.size)}
    assert_equals_one_process(partial(make, 4), (x, y), 4, **makes, **how)


class PerRow(keras.layers.Layer):
    """Has a weight for each row of a batch."""

    def build(self, shape):
        """Of the batch's size, as it was built for."""
        self.each = self.add_weight(shape=tuple(shape), name="each")

    def call(self, x):
        """Each row by its own."""
        return x * self.each


class Constant(keras.Model):
    """Its step has the rows of a batch as a constant, and a weight that looks so."""

    def __init__(self, units):
        super().__init__()
        self.first, self.last = keras.layers.Dense(units), keras.layers.Dense(1)

    def call(self, x):
        """With a number for each of twelve rows."""
        return self.last(self.first(x)) + keras.random.normal((12, 1))

    def train_step(self, data):
        """As Keras's, so that it is tried."""
        return super().train_step(data)


@pytest.mark.three_ranks
@pytest.mark.several_ranks
@pytest.mark.parametrize("kind", ["weight", "input", "constant"])
def test_steps_for_a_number_of_rows_in_a_global_batch(world, kind):
    """An error that leads to one process, or to batches of each rank's own."""

    def make():
        inputs = [keras.Input((3,), batch_size=12)] if kind == "input" else []
        model: keras.Model = Constant(12 // world.size)
        if kind != "constant":
            model = keras.Sequential([*inputs, PerRow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x = np.ones((72, 3))
    call = fit(make(), x, x[:, :1], batch_size=12, batch="global")
    texts = "keras-dist run -np 1", 'batch="rank"'
    errors = raises_everywhere((ValueError, TypeError), call, *texts)
    text = "weights have an entry for each row"
    assert all((text in error) == (kind == "weight") for error in errors)
    fit(make(), x, x[:, :1], batch_size=12, batch="rank")()
    if kind == "weight":  # of ranks with other numbers of rows
        call = fit(make(), x, x[:, :1], batch_size=11, batch="global")
        raises_everywhere(ValueError, call, "keras-dist run -np 1")


@pytest.mark.several_ranks
@pytest.mark.parametrize("is_built", [True, False])
def test_float8_is_an_error(rows, is_built):
    """Gradients of its scales are new values: sums over the ranks would grow."""
    layer = keras.layers.Dense(1, dtype=None if is_built else "float8_from_float32")
    model = keras.Sequential([*[keras.Input((5,))] * is_built, layer])
    if is_built:
        model.quantize("float8")
    model.compile("sgd", "mse", run_eagerly=False)
    raises_everywhere(ValueError, fit(model, *rows), "float8", "mixed_bfloat16")


@pytest.mark.parametrize("inside", ["layers, compile", "layers", "compile", "fit"])
def test_a_model_that_tensorflow_distributes_is_an_error(world, rows, inside):
    """Wherever the scope was: of its layers, of its optimizer, or of the fit."""

    def scope(part):
        return strategy.scope() if part in inside else contextlib.nullcontext()

    def train():
        with scope("fit"):
            fit(model, *rows)()

    # One that keeps each variable once per device, as on several GPUs.
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    for first in [keras.Input((5,))], []:
        if first == [] and inside != "layers, compile":
            continue
        with scope("layers"):
            model = keras.Sequential([*first, keras.layers.Dense(1)])
        with scope("compile"):
            model.compile("adam", "mse")
        texts = "already distributed by TensorFlow", "MirroredStrategy"
        raises_everywhere(ValueError, train, *texts)


def test_unknown_rules_and_negative_factors(world, make_model, rows, monkeypatch):
    """Each message lists the valid rules, or names the smallest number."""
    bad = {
        "lr_scaling": ("cubic", -1.0, 0, float("inf"), lambda size: -size),
        "steps_scaling": ("halve", 2.0, None),
        "validation_steps_scaling": ("halve", -3),
        "shard": ("rows", None),
        "warmup_epochs": (-1,),
        "save_steps": (0, 1.5),
        "save_seconds": (-1,),
    }
    model = make_model()
    for name, values in bad.items():
        for value in values:
            call = fit(model, *rows, steps_per_epoch=3, **{name: value})
            raises_everywhere(ValueError, call, "Received: ")
    call = fit(model, *rows)
    monkeypatch.setenv("KERAS_DIST_GATHER_MIB", "16MiB")
    raises_everywhere(ValueError, call, "Received: KERAS_DIST_GATHER_MIB='16MiB'")
    monkeypatch.undo()
    call = fit(model, *rows, target_accuracy=0.5)
    raises_everywhere(ValueError, call, "validation_data")
    for batch_size in (-3, 2.5) if world.size > 1 else ():
        call = fit(model, *rows, batch_size=batch_size)
        raises_everywhere(ValueError, call, f"batch_size={batch_size}")
    for name in ("steps_per_epoch", "validation_steps", "validation_batch_size"):
        call = fit(model, *rows, validation_data=rows, **{name: -3})
        if world.size > 1:
            raises_everywhere(ValueError, call, f"Received: {name}=-3")


@pytest.mark.three_ranks
@pytest.mark.several_ranks
def test_ranks_that_differ(world, make_model, rows):
    """Rows, steps, epochs, models, callbacks: named with who has what."""
    x, y = rows
    own = len(x) - world.rank
    part = x[: 60 - 20 * world.rank], y[: 60 - 20 * world.rank]
    data = tf.data.Dataset.from_tensor_slices((x, y))
    batches = data.batch(10 + 10 * world.rank)
    one_more = data.batch(8).take(9 + min(world.rank, 1))
    callbacks = [keras.callbacks.TerminateOnNaN()] if world.rank else []
    op = "sum" if world.rank else "average"
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(), op=op)
    differing = [
        (fit(make_model(), x[:own], y[:own]), "the number of rows"),
        (fit(make_model(), x, y, epochs=1 + world.rank), "`epochs`"),
        (fit(make_model(), x, y, batch_size=8 + world.rank), "the batch size"),
        (
            fit(make_model(), x, y, batch_size=4, steps_per_epoch=9 * world.rank + 9),
            "the steps of an epoch",
        ),
        (
            fit(make_model(), *part, shard="none", batch_size=10),
            "the batches of a pass over its rows",
        ),
        (fit(make_model(), batches), "the batches of a pass over its data"),
        (fit(make_model(), one_more), "the batches of a pass over its data"),
        (
            fit(make_model(), x, y, validation_data=one_more),
            "the validation batches of a pass",
        ),
        (fit(make_model(), x, y, callbacks=callbacks), "the callbacks"),
        (fit(make_model(optimizer), x, y), "`op` and `compression`"),
    ]
    for first in ([], [keras.Input((5,))]):  # late models, and built ones
        wide = [keras.layers.Dense(1 + world.rank)]
        deep = [keras.layers.Dense(1) for _ in range(1 + world.rank)]
        for layers, fact in (
            (wide, "the shape of variable 0"),
            (deep, "the number of variables"),
        ):
            model = keras.Sequential([*first, *layers])
            model.compile("sgd", lambda y, prediction: keras.ops.mean(prediction))
            differing.append((fit(model, x, y), fact))
    for call, fact in differing:
        raises_everywhere(ValueError, call, f"disagree on {fact}", "rank 1: ")


@pytest.mark.several_ranks
def test_endless_data_needs_steps(make_model, rows):
    """And what cannot be read by row has to be split before."""
    endless = tf.data.Dataset.from_tensor_slices(rows).batch(9).repeat()
    call = fit(make_model(), endless)
    raises_everywhere(ValueError, call, "Pass `steps_per_epoch`")
    sparse = tf.sparse.from_dense(rows[0])
    many = keras_dist.DistributedModel(make_model())
    for call in (
        fit(make_model(), sparse, rows[1], validation_split=0.5),
        fit(make_model(), *rows, validation_data=(sparse, rows[1])),
        lambda: many.evaluate(sparse, rows[1], verbose=0),
    ):
        raises_everywhere(ValueError, call, "Sparse tensors cannot be sharded")


@pytest.mark.three_ranks
@pytest.mark.several_ranks
def test_a_variable_with_a_gradient_on_one_rank_only(rows):
    """It would be averaged by some ranks and not by others."""

    class Uneven(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = keras.layers.Dense(1), keras.layers.Dense(1)

        def call(self, x):
            y = self.used(x)
            other = self.spare(x)
            return y + other if keras_dist.rank() == 0 else y

    model = Uneven()
    model.compile("sgd", "mse")
    text = "disagree on gradient 2 (of uneven/dense"
    raises_everywhere(ValueError, fit(model, *rows), text)


@pytest.mark.several_ranks
def test_a_data_set_that_was_cut_short_is_an_error(world, rows, make_model, tmp_path):
    """In training, validation and evaluation; its cache was written by a shorter one.

    All ranks read such a file here: it is an error on each, and none waits.
    """
    path = str(tmp_path / f"cache{world.rank}")
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(8, drop_remainder=True)
    short, whole = batches.take(7).cache(path), batches.cache(path)
    assert (len(list(short)), len(whole)) == (7, 12)
    model = make_model()
    many = keras_dist.DistributedModel(model)
    for call in (
        fit(model, whole),
        fit(model, batches, validation_data=whole),
        fit(model, whole, shard="none"),
        lambda: many.evaluate(whole, verbose=0),
    ):
        text = "another number of batches than the data set's"
        raises_everywhere(RuntimeError, call, text)


@pytest.mark.several_ranks
def test_ranks_that_count_optimizers_differently_do_not_wait(
    world, make_model, rows, monkeypatch
):
    """Collectives of other names would never meet; the ranks compare the numbers."""
    monkeypatch.setattr(reduce, "_numbers", itertools.count(1000 + world.rank))
    text = "optimizers that averaged before. Received: rank 0: 1000"
    raises_everywhere(ValueError, fit(make_model(), *rows), text)


class SkipsNaN(keras.Model):
    """Leaves an update out where its loss is NaN."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        tf.cond(
            tf.math.is_finite(loss),
            lambda: self.optimizer.apply(gradients, weights),
            lambda: None,
        )
        return {"loss": loss}


@pytest.mark.three_ranks
@pytest.mark.several_ranks
@pytest.mark.parametrize("is_eager", [False, True])
def test_an_update_that_one_rank_leaves_out_is_an_error_on_all(world, rows, is_eager):
    """In the step after, where it would be averaged with another step's."""
    x, y = (array[:96].copy() for array in rows)
    x[22] = np.nan  # row 10 of 12
    inputs = keras.Input((5,))
    model = SkipsNaN(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", run_eagerly=is_eager)

    call = fit(model, x, y, batch_size=12, shuffle=False, batch="global")
    raises_everywhere(RuntimeError, call, f"on rank {10 * world.size // 12}.")
    assert int(model.optimizer.iterations) <= 2
