"""`batch="global"`: the same script as on one process, and the same model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import distribute_jobs, raises_everywhere, shortened, state_of
from data_kinds import Sequence

import keras_dist

pytestmark = [
    pytest.mark.several_ranks,
    pytest.mark.three_ranks,
    pytest.mark.usefixtures("in_float64"),
]

KINDS = ["arrays", "dataset", "shuffled", "endless", "sequence", "generator", "unknown"]


def rows_of(count, seed):
    """Rows of two classes, which are not quite separable."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 5))
    y = (x.sum(axis=1) + generator.normal(size=count) > 0).astype("float64")
    return x, y


def data_of(kind, count, batch_size, seed=0):
    """Data of a kind, as arguments of `fit`; its last batch has one row."""
    x, y = rows_of(count, seed)
    keras.utils.set_random_seed(1)  # a part of the order of a shuffle
    data = tf.data.Dataset.from_tensor_slices((x, y))
    batches = Sequence(x, y, [batch_size])
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": batch_size}
    if kind == "dataset":
        return {"x": data.batch(batch_size)}
    if kind == "shuffled":
        return {"x": data.shuffle(count, seed=4).batch(batch_size)}
    if kind == "endless":
        return {"x": data.batch(batch_size).repeat(), "steps_per_epoch": 4}
    if kind == "sequence":
        return {"x": batches, "shuffle": False}
    if kind == "generator":
        endless = (batches[i % len(batches)] for i in range(1000))
        return {"x": endless, "steps_per_epoch": len(batches)}
    return {"x": data.batch(batch_size).filter(lambda *batch: True)}


def compiled(optimizer=None, loss="binary_crossentropy", **options):
    """A small model with metrics whose means are not means of batches.

    It runs eagerly unless `options` say else: tracing takes longer than training.
    """
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Dense(8, activation="tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    optimizer = optimizer or keras.optimizers.Adam(0.02, global_clipnorm=0.5)
    options = {"run_eagerly": True, "jit_compile": False} | options
    model.compile(optimizer, loss, metrics=metrics, **options)
    return model


def trained(arguments, *, is_ours, model=None, options=(), **more):
    """What a fit leaves: states, and its logs."""
    model = model or compiled()
    given = {"verbose": 0, "epochs": 2} | arguments | more
    options = {"batch": "global"} | dict(options)

    def fit():
        keras.utils.set_random_seed(5)
        if is_ours:
            history = keras_dist.dist_fit(model, **given, **options)
        else:
            history = model.fit(**given)
        logs = {k: v for k, v in history.history.items() if k != "rows_per_second"}
        return [*state_of(model), *(np.asarray(logs[name]) for name in sorted(logs))]

    return fit() if is_ours else distribute_jobs([fit])[0]


def assert_equal(ours, expected):
    """Equal to rounding in float64."""
    assert len(ours) == len(expected)
    for own, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", shortened(KINDS, {"arrays", "shuffled"}))
def test_the_same_script_gives_the_same_model_and_logs(kind):
    """Of all kinds of data; the last batch has fewer rows than there are ranks."""
    results = []
    for is_ours in (True, False):
        arguments = data_of(kind, 41, 10) | {"shuffle": False}
        if kind not in ("generator", "endless"):
            same = "dataset" if kind in ("shuffled", "unknown") else kind
            given = data_of(same, 33, 8, seed=1)
            data = (given["x"], given["y"]) if "y" in given else given["x"]
            arguments |= {"validation_data": data}
        results.append(trained(arguments, is_ours=is_ours))
    assert_equal(*results)


@pytest.mark.parametrize("batch", shortened(["global", "rank"], {"global"}))
def test_a_look_at_validation_data_does_not_change_the_order(world, batch):
    """It is the shuffled training data, with fewer batches than there are ranks."""
    results = []
    for is_ours in (True, False):
        count = 20 if batch == "rank" and not is_ours else 20 // (world.size - 1)
        data = data_of("shuffled", 20, count)["x"]
        given = {"x": data, "validation_data": data, "epochs": 3, "shuffle": False}
        options = {"batch": batch, "lr_scaling": "none"}
        results.append(trained(given, is_ours=is_ours, options=options))
    assert_equal(*results)


@pytest.mark.parametrize(
    "kind", shortened(["arrays", "dataset", "sequence"], {"sequence"})
)
def test_an_evaluation_of_some_batches_is_that_of_one_process(kind):
    """`validation_steps` are those of all ranks; sums count as on one process."""
    results = []
    for is_ours in (True, False):
        loss = keras.losses.BinaryCrossentropy(reduction="sum")
        model = compiled(keras.optimizers.SGD(0.001), loss)
        arguments = data_of(kind, 40, 10) | {"shuffle": False}
        given = data_of(kind, 33, 4, seed=1)
        data = (given["x"], given["y"]) if "y" in given else given["x"]
        arguments |= {"validation_data": data, "validation_steps": 4}
        if "y" in given:
            arguments["validation_batch_size"] = 4
        results.append(trained(arguments, is_ours=is_ours, model=model))
    assert_equal(*results)


@pytest.mark.parametrize(
    "kind", shortened(["dataset", "sequence", "unknown"], {"unknown"})
)
@pytest.mark.parametrize("batch", shortened(["global", "rank"], {"global"}))
def test_weights_of_classes_are_those_of_one_process(world, kind, batch):
    """Keras cannot weigh a batch that a rank has no row of: it is done before.

    And what Keras weighs it reads ahead, while a step in Python sums its gradients.
    """
    if batch == "rank" and kind != "unknown":
        return
    results = []
    for is_ours in (True, False):
        rows = 4 * world.size if batch == "rank" and not is_ours else 4
        count, rows = (48, rows) if batch == "rank" else (41, 10)
        arguments = data_of(kind, count, rows) | {"shuffle": False}
        arguments["class_weight"] = {0: 0.3, 1: 2.0}
        options = {"batch": batch, "lr_scaling": "none"}
        model = compiled(run_eagerly=True)
        found = trained(arguments, is_ours=is_ours, options=options, model=model)
        results.append(found[:4])
    assert_equal(*results)


@pytest.mark.parametrize("count", shortened([37, 48], {37}))
def test_rows_divided_before_they_are_decoded_are_those_of_one_process(count):
    """With a last batch without a row for some ranks, and as validation data."""
    results = []
    for is_ours in (True, False):
        batch = keras_dist.shard(12, batch="global") if is_ours else lambda data: data
        rows = keras_dist.local_batch_size(12) if is_ours else 12

        def divided(data, batch=batch, rows=rows):
            return data.apply(batch).map(lambda x, y: (x * 2, y)).batch(rows)

        keras.utils.set_random_seed(1)
        data = tf.data.Dataset.from_tensor_slices(rows_of(count, 0))
        weights = {"class_weight": {0: 0.3, 1: 2.0}}
        others = tf.data.Dataset.from_tensor_slices(rows_of(33, 1))
        arguments = {"x": divided(data.shuffle(count, seed=3))}
        arguments["validation_data"] = divided(others)
        results.append(trained(arguments | weights, is_ours=is_ours))
    assert_equal(*results)


@pytest.mark.parametrize("kind", shortened(["arrays", "dataset"], {"arrays"}))
def test_a_training_that_was_ended_goes_on_as_that_of_one_process(kind, folder):
    """In the middle of an epoch, before a last batch without a row for some ranks."""

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 9:
                raise KeyboardInterrupt

    data = data_of(kind, 41, 10) | {"shuffle": False}
    options = {"resume": f"{folder}/{kind}", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        trained(data, is_ours=True, options=options, callbacks=[Ends()])
    ours = trained(data, is_ours=True, options=options)
    assert_equal(ours, trained(data, is_ours=False))


def test_a_model_is_evaluated_before_it_was_trained():
    """A rank without a batch makes the metrics, too, and they count nothing."""
    data = data_of("dataset", 9, 10)["x"]
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
        assert "5 an epoch" in shown and "→ 5 an epoch" not in shown


def _divided(x, y, **options):
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return rows.apply(keras_dist.shard(12, **options)).batch(7)


def test_what_cannot_be_shared_is_an_error_before_the_first_step(world):
    """On all ranks."""
    x, y = rows_of(12, 0)

    def fit(x=x, y=y, **options):
        keras_dist.dist_fit(compiled(), x, y, verbose=0, **options)

    few = {"batch": "global", "batch_size": world.size - 1}
    [message, *_] = raises_everywhere(ValueError, lambda: fit(**few))
    assert f"batch_size={world.size - 1} for {world.size} ranks" in message
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(world.size - 1)
    [message, *_] = raises_everywhere(
        ValueError, lambda: fit(batches, None, batch="global")
    )
    assert f"batches of {world.size - 1} rows" in message
    for options, text in (
        ({"batch": "all"}, "`batch` must be"),
        ({"x": _divided(x, y), "y": None, "batch": "global"}, "`shard` for batches of"),
        ({"x": _divided(x, y, batch="global"), "y": None}, "`shard` for batches of"),
        (
            {"x": _divided(x, y, batch="global"), "y": None, "batch": "global"},
            "local_batch_size(…)",
        ),
    ):
        [message, *_] = raises_everywhere(ValueError, lambda o=options: fit(**o))
        assert text in message

    def add_up():
        model = compiled()
        keras_dist.DistributedOptimizer(model.optimizer, op="sum")
        keras_dist.dist_fit(model, x, y, batch="global", verbose=0)

    [message, *_] = raises_everywhere(ValueError, add_up)
    assert "depends on the number of ranks" in message
