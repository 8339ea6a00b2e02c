"""`batch="global"`: the same script as on one process, and the same model."""

import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equals_one_process,
    largest_difference,
    raises_everywhere,
    shortened,
    warned,
)
from harness.data_kinds import BATCHES, Loader, Sequence
from harness.models import make_compiled, perceptron

import keras_dist

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.usefixtures("in_float64"),
]

KINDS = ["arrays", "batched", "shuffled", "endless", "sequence", "generator"]
KINDS += ["filtered batches"]
STEPS = {"endless": {"steps_per_epoch": 4}, "generator": {"steps_per_epoch": 5}}


def rows_of(count, seed):
    """Rows of two classes, which are not quite separable."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 5))
    y = (x.sum(axis=1) + generator.normal(size=count) > 0).astype("float64")
    return x, y


def data_of(kind, count, seed=0):
    """Data of a kind: arrays, or a function that makes batches of so many rows."""
    x, y = rows_of(count, seed)
    if kind == "arrays":
        return x, y
    if kind == "endless":
        return lambda size: BATCHES["batched"](x, y, size).repeat()
    if kind == "generator":
        return lambda size: (each for each in itertools.cycle(Loader(x, y, size)))
    return partial(BATCHES[kind], x, y)


def validation_of(kind, size):
    """33 rows of the same kind, in batches of `size` but for arrays."""
    data = data_of(kind, 33, seed=1)
    return data(size) if callable(data) else data


def compiled(optimizer=None, loss="binary_crossentropy"):
    """A small model with metrics whose means are not means of batches.

    It runs eagerly: tracing takes longer than training.
    """
    optimizer = optimizer or keras.optimizers.Adam(0.02, global_clipnorm=0.5)
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    given = {"metrics": metrics, "run_eagerly": True}
    return make_compiled(perceptron, optimizer, loss, **given)


def assert_equals(data, size=10, *, make=compiled, **arguments):
    """The claim of this file, to rounding in float64."""
    given = {"batch": "global", "epochs": 2, "tolerance": 1e-10} | arguments
    return assert_equals_one_process(make, data, size, **given)


@pytest.mark.parametrize("kind", shortened(KINDS, {"arrays"}))
def test_the_same_script_gives_the_same_model_and_logs(kind):
    """Of all kinds of data; the last batch has fewer rows than there are ranks."""
    more = STEPS.get(kind, {})
    if not more:
        same = "batched" if kind in ("shuffled", "filtered batches") else kind
        more = {"validation_data": validation_of(same, 8)}
    assert_equals(data_of(kind, 41), **more)


@pytest.mark.parametrize(
    ("kind", "size"),
    shortened([(kind, n) for kind in KINDS for n in (1, 2)], {("arrays", 1)}),
)
def test_batches_of_fewer_rows_than_ranks_train(kind, size):
    """The ranks without a row take part in each step."""
    assert_equals(data_of(kind, 5), size, **STEPS.get(kind, {}))


def test_ragged_tensors_train_as_arrays_do():
    """With a part held out, and in an evaluation and a prediction."""
    x, y = rows_of(24, 0)
    lengths = 1 + np.arange(24) % 5
    ragged = tf.RaggedTensor.from_tensor(x, lengths)

    class Sums(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, activation="sigmoid")

        def call(self, x):
            return self.dense(x.to_tensor(shape=[None, 5]))

    def make():
        keras.utils.set_random_seed(1)
        model = Sums()
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
        return model

    model, _, _ = assert_equals((ragged, y), make=make, validation_split=0.25)
    plain = model.evaluate(ragged, y, verbose=0), model.predict(ragged, verbose=0)
    many = keras_dist.DistributedModel(model)
    np.testing.assert_allclose(many.evaluate(ragged, y, verbose=0), plain[0], 1e-10)
    np.testing.assert_allclose(many.predict(ragged, verbose=0), plain[1], 1e-10)


@pytest.mark.parametrize("batch", shortened(["global", "rank"], {"global"}))
def test_a_look_at_validation_data_does_not_change_the_order(world, batch):
    """It is the shuffled training data, with fewer batches than there are ranks."""

    def twice(size):
        data = data_of("shuffled", 20)(size)
        return {"x": data, "validation_data": data}

    assert_equals(twice, 20 // (world.size - 1), batch=batch, epochs=3)


@pytest.mark.parametrize(
    "kind", shortened(["arrays", "batched", "sequence"], {"sequence"})
)
def test_an_evaluation_of_some_batches_is_that_of_one_process(kind):
    """`validation_steps` count for all ranks; sums count as on one process."""

    def make():
        loss = keras.losses.BinaryCrossentropy(reduction="sum")
        return compiled(keras.optimizers.SGD(0.001), loss)

    steps = {"validation_steps": 4, "validation_batch_size": 4}
    if kind != "arrays":
        del steps["validation_batch_size"]
    data = data_of(kind, 40)
    assert_equals(data, make=make, validation_data=validation_of(kind, 4), **steps)


@pytest.mark.parametrize(
    ("kind", "batch"),
    shortened(
        [(kind, "global") for kind in ("batched", "sequence")]
        + [(kind, "rank") for kind in ("filtered batches", "batched")]
        + [(kind, "global") for kind in ("filtered batches", "arrays")],
        {("filtered batches", "global")},
    ),
)
def test_weights_of_classes_are_those_of_one_process(kind, batch):
    """Keras cannot weigh a batch that a rank has no row of: it is done before.

    And what Keras weighs it reads ahead, while a step in Python sums its gradients. Of
    13 batches of the ranks, one is left over.
    """
    count, size = (52, 4) if batch == "rank" else (41, 10)
    weights = {0: 0.3, 1: 2.0}
    if kind == "arrays":  # of which `np.unique` gives floats
        weights = {np.float32(0): 0.3, 0.5: 9.0, 1.0: 2.0}
    given = {"class_weight": weights, "logs": ()}
    assert_equals(data_of(kind, count), size, batch=batch, **given)


@pytest.mark.parametrize("count", shortened([37, 48], {37}))
def test_rows_divided_before_they_are_decoded_are_those_of_one_process(count):
    """With a last batch without a row for some ranks, and as validation data."""

    def data(divide, rows):
        keras.utils.set_random_seed(1)
        x, others = map(
            tf.data.Dataset.from_tensor_slices, (rows_of(count, 0), rows_of(33, 1))
        )
        made = {"x": x.shuffle(count, seed=3), "validation_data": others}
        return {
            name: divide(each).map(lambda x, y: (x * 2, y)).batch(rows)
            for name, each in made.items()
        }

    def divided(size):
        divide = keras_dist.shard(size, batch="global")
        return data(divide, keras_dist.local_batch_size(size))

    given = {"plain_data": lambda size: data(lambda rows: rows, size)}
    assert_equals(divided, 12, class_weight={0: 0.3, 1: 2.0}, **given)


@pytest.mark.parametrize("kind", shortened(["arrays", "batched"], {"arrays"}))
def test_a_training_that_was_ended_goes_on_as_that_of_one_process(kind, folder):
    """In the middle of an epoch, before a last batch without a row for some ranks."""

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 9:
                raise KeyboardInterrupt

    data, options = data_of(kind, 41), {"resume": folder, "save_steps": 1}
    given = data if kind == "arrays" else (data(10), None)
    how = {"epochs": 2, "shuffle": False, "verbose": 0, "batch": "global"} | options
    how["batch_size"] = 10 if kind == "arrays" else None
    with pytest.raises(KeyboardInterrupt):
        keras_dist.dist_fit(compiled(), *given, callbacks=[Ends()], **how)
    assert_equals(data, options=options)


def test_a_model_is_evaluated_before_it_was_trained():
    """A rank without a batch makes the metrics, too, and they count nothing."""
    data = data_of("batched", 9)(10)
    ours = keras_dist.DistributedModel(compiled(), batch="global")
    expected = compiled().evaluate(data, verbose=0, steps=1)
    np.testing.assert_allclose(ours.evaluate(data, verbose=0, steps=1), expected)
    x, y = rows_of(9, 0)
    np.testing.assert_allclose(ours.evaluate(x, y, verbose=0), expected, rtol=1e-10)


def test_the_plan_says_whose_batch_it_is(capsys, world):
    """With the rows of each rank."""
    x, y = rows_of(41, 0)
    keras_dist.dist_fit(compiled(), x, y, batch="global", batch_size=10, verbose=2)
    shown = capsys.readouterr().out
    more, least = 10 % world.size, 10 // world.size
    shares = f"{more} × {least + 1} + " if more > 1 else f"{least + 1} + " * (more > 0)
    if world.rank == 0:
        assert f"10 global: {shares}{world.size - more} × {least} rows" in shown
        assert "5 per epoch" in shown and "→ 5 per epoch" not in shown


def _divided(x, y, **options):
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return rows.apply(keras_dist.shard(12, **options)).batch(7)


def test_what_cannot_be_shared_is_an_error_before_the_first_step(world):
    """On all ranks."""
    x, y = rows_of(12, 0)

    def fit(x=x, y=y, **options):
        keras_dist.dist_fit(compiled(), x, y, verbose=0, **options)

    odd = {"batch": "global", "batch_size": world.size + 1, "shard": "none"}
    for options, text in (
        (odd, "a multiple of the number of ranks"),
        ({"batch": "all"}, "`batch` must be"),
        ({"x": _divided(x, y), "y": None, "batch": "global"}, "`shard` for batches of"),
        ({"x": _divided(x, y, batch="global"), "y": None}, "`shard` for batches of"),
        (
            {"x": _divided(x, y, batch="global"), "y": None, "batch": "global"},
            "local_batch_size(…)",
        ),
    ):
        raises_everywhere(ValueError, lambda options=options: fit(**options), text)

    def add_up():
        model = compiled()
        keras_dist.DistributedOptimizer(model.optimizer, op="sum")
        keras_dist.dist_fit(model, x, y, batch="global", verbose=0)

    raises_everywhere(ValueError, add_up, "depends on the number of ranks")


class Pool(keras.utils.PyDataset):
    """Batches of the rows that come next, whatever index is asked for; notes calls."""

    def __init__(self):
        super().__init__()
        self.cursor, self.calls = 0, []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.calls.append(index)
        rows = np.arange(self.cursor, self.cursor + 8) % 40
        self.cursor += 8
        x = np.random.default_rng(0).normal(size=(40, 5))[rows]
        return x, (x[:, :1] > 0) * 1.0

    def on_epoch_end(self):
        self.calls.append("end")


def test_a_loader_with_a_position_of_its_own_is_asked_as_by_keras():
    """Our look at the data is that of Keras; no batch is read without use."""
    found = []
    for fit in keras.Model.fit, partial(keras_dist.dist_fit, batch="global"):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = Pool()
        fit(model, data, epochs=3, verbose=0)
        found.append((data.calls, model))
    (plain_calls, plain), (calls, ours) = found
    assert calls == plain_calls
    assert largest_difference(ours, plain) < 1e-6


def test_data_that_no_rank_can_read_in_part_is_a_warning(make_model):
    """Of which each rank reads some batches: they depend on those before."""
    with warned("others when they are read again") as messages:
        model = make_model()
        keras_dist.dist_fit(model, Pool(), verbose=0)
    assert len(messages) == (keras_dist.rank() == 0)


def test_data_that_differs_in_a_script_for_one_process_is_a_warning(make_model, world):
    """`distribute` takes it for divided; `dist_fit` says so in the plan alone."""
    x = np.random.default_rng(world.rank).normal(size=(24, 5)).astype("float32")
    name = "Each rank has other training data"
    with warned(name) as messages, keras_dist.distribute():
        model = make_model()
        model.fit(Sequence(x, x[:, 0] > 0, [8]), verbose=0)
    assert len(messages) == (world.rank == 0)


@pytest.mark.skipif(
    not hasattr(keras.config, "set_max_steps_per_epoch"), reason="an older Keras"
)
@pytest.mark.parametrize("kind", shortened(["arrays", "batched"], {"arrays"}))
def test_a_limit_of_keras_on_steps_is_one_of_all_ranks(kind):
    """Each epoch, and evaluation, has so many steps of one process."""
    keras.config.set_max_steps_per_epoch(3)
    try:
        data, validation = data_of(kind, 60), validation_of(kind, 8)
        model, _, _ = assert_equals(data, validation_data=validation)
        x, y = rows_of(60, seed=2)
        plain = model.evaluate(x, y, batch_size=8, verbose=0)
        many = keras_dist.DistributedModel(model, batch="global")
        found = many.evaluate(x, y, batch_size=8, verbose=0)
        np.testing.assert_allclose(found, plain, 1e-6)
        given = {"batch_size": 8, "verbose": 0}
        plain, found = model.predict(x, **given), many.predict(x, **given)
        np.testing.assert_allclose(found, plain, 1e-6)
    finally:
        keras.config.set_max_steps_per_epoch(None)
