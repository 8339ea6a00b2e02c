"""Metrics of many ranks equal one process on all rows."""

import collections
import functools
import inspect
import os
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    raises_everywhere,
    warned,
)
from harness.models import dropping, make_compiled, perceptron, update

import keras_dist
from keras_dist.training.metric_state import record_starts
from keras_dist.training.metrics import UpdateCounts, global_result

NUM_ROWS, NUM_CLASSES = 61, 3


def kinds():
    """The data of each kind of metric, the same on every rank: targets, predictions."""
    generator = np.random.default_rng(5)
    shape = (NUM_ROWS, NUM_CLASSES)
    labels = generator.integers(0, NUM_CLASSES, NUM_ROWS)
    scores = generator.dirichlet(np.ones(NUM_CLASSES), NUM_ROWS).astype("float32")
    one_hot = np.eye(NUM_CLASSES, dtype="float32")[labels]
    guessed = np.where(generator.random(NUM_ROWS) < 0.7, labels, 0)
    positive = generator.random(shape).astype("float32")
    return {
        "labels": (labels, guessed),
        "sparse": (labels, scores),
        "one hot": (one_hot, scores),
        "guesses": (one_hot, np.eye(NUM_CLASSES, dtype="float32")[guessed]),
        "binary": ((labels > 0).astype("float32")[:, None], scores[:, 1:2]),
        "signed": (one_hot * 2 - 1, positive * 2 - 1),
        "positive": (positive + 0.1, scores + 0.1),
        "centered": (positive - 0.5, positive * 0.6 + scores * 0.2 - 0.4),
        "values": (positive,),
    }


# The data that each metric of Keras is given, and how some of them are made.
CASES = {
    name: [({}, kind)]
    for kind, names in {
        "binary": "AUC BinaryAccuracy BinaryCrossentropy BinaryIoU FalseNegatives"
        " Precision TrueNegatives TruePositives",
        "labels": "Accuracy",
        "one hot": "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge"
        " F1Score KLDivergence",
        "positive": "ConcordanceCorrelation LogCoshError MeanAbsoluteError"
        " MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError"
        " PearsonCorrelation Poisson RootMeanSquaredError",
        "signed": "CosineSimilarity Hinge SquaredHinge",
        "sparse": "SparseCategoricalAccuracy SparseCategoricalCrossentropy",
        "values": "Mean Sum",
        "centered": "R2Score",
    }.items()
    for name in names.split()
}
for _name, _options, _kind in [
    ("AUC", {"curve": "PR", "multi_label": True}, "one hot"),
    ("F1Score", {"average": "macro"}, "one hot"),
    ("FBetaScore", {"beta": 0.5, "average": "micro"}, "one hot"),
    ("FalsePositives", {"thresholds": [0.2, 0.4]}, "binary"),
    ("IoU", {"num_classes": NUM_CLASSES, "target_class_ids": [0, 2]}, "labels"),
    ("MeanIoU", {"num_classes": NUM_CLASSES}, "labels"),
    ("MeanMetricWrapper", {"fn": keras.losses.huber, "name": "huber"}, "positive"),
    ("MeanSquaredError", {"dtype": "float64"}, "positive"),
    ("OneHotIoU", {"num_classes": NUM_CLASSES, "target_class_ids": [0, 1]}, "guesses"),
    ("OneHotMeanIoU", {"num_classes": NUM_CLASSES}, "guesses"),
    ("Precision", {"top_k": 2, "class_id": 1}, "one hot"),
    ("PrecisionAtRecall", {"recall": 0.5}, "binary"),
    ("R2Score", {"num_regressors": 2}, "centered"),
    ("Recall", {"thresholds": [0.2, 0.4]}, "binary"),
    ("RecallAtPrecision", {"precision": 0.6}, "binary"),
    ("SensitivityAtSpecificity", {"specificity": 0.5}, "binary"),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, "sparse"),
    ("SpecificityAtSensitivity", {"sensitivity": 0.5}, "binary"),
    ("TopKCategoricalAccuracy", {"k": 2}, "one hot"),
]:
    CASES.setdefault(_name, []).append((_options, _kind))


def shown(metrics, data, rows, weight):
    """The metrics after rows of their data, in two batches."""
    for name, (metric, kind) in metrics.items():
        metric.reset_state()
        for batch in (rows[:5], rows[5:]) if len(rows) > 5 else (rows,):
            arrays = [array[batch] for array in data[kind]]
            try:
                metric.update_state(
                    *arrays, sample_weight=None if weight is None else weight[batch]
                )
            except Exception as error:
                raise AssertionError(name) from error
    return {name: metric for name, (metric, _) in metrics.items()}


def results_of(metrics):
    """Name and result of each."""
    return {name: metric.result() for name, metric in metrics.items()}


def values_of(metrics):
    """State of each, as arrays."""
    return [v.numpy() for metric in metrics.values() for v in metric.variables]


def made(names):
    """The metrics of all cases of these names."""
    return {
        title: (getattr(keras.metrics, name)(**{"name": title} | options), kind)
        for name in sorted(names)
        for index, (options, kind) in enumerate(CASES[name])
        for title in [f"{name} {index}"]
    }


def shards(rank, size):
    """Shards of the rows: a name, this rank's rows, whether they count."""
    rows, is_last = np.arange(NUM_ROWS), rank == size - 1
    yield "by row", rows[rank::size], True
    if size > 1:
        begin, end = (9 * index * (index + 1) // 2 for index in (rank, rank + 1))
        yield "uneven", rows[begin : None if is_last else end], True
        others = rows[rank :: size - 1]
        yield "none on the last", rows[:1] if is_last else others, not is_last


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
def test_every_metric_of_keras_is_that_of_one_process(world):
    """All members, weighted or not, in uneven shards, and with a rank without a row."""
    base = keras.metrics.Metric
    classes = inspect.getmembers(keras.metrics, inspect.isclass)
    known = {name for name, kind in classes if issubclass(kind, base) and kind != base}
    assert known <= set(CASES), f"no case for {known - set(CASES)}"
    assert len(known) >= len(CASES) - 2  # two that an older Keras has not
    data, whole, own = kinds(), made(known), made(known)
    weights = np.random.default_rng(1).uniform(0, 2, NUM_ROWS).astype("float32")
    rows = np.arange(NUM_ROWS)
    expected = {}
    for is_weighted, weight in ((False, None), (True, weights)):
        results = results_of(shown(whole, data, rows, weight))
        # Copies: some results are the variable itself.
        expected[is_weighted] = {n: np.array(value) for n, value in results.items()}
    for shard, part, has_rows in shards(world.rank, world.size):
        is_weighted = shard != "by row"
        metrics = shown(own, data, part, weights if is_weighted else None)
        before = values_of(metrics)
        given = global_result(
            list(metrics.values()),
            lambda metrics=metrics: results_of(metrics),
            seen=UpdateCounts(len(part), has_rows=has_rows),
        )
        for name, value in expected[is_weighted].items():
            assert np.asarray(given[name]) == pytest.approx(
                value, abs=1e-6, rel=1e-6
            ), (name, shard)
        after = values_of(metrics)
        assert all((a == b).all() for a, b in zip(before, after, strict=True))


class Largest(keras.metrics.Metric):
    """A state that does not add up, with its own rule."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), lambda *_, **__: -np.inf, name="value")

    def reset_state(self):
        self.value.assign(-np.inf)

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def merge_states(self, states):
        """The largest of all."""
        self.value.assign(max(value for (value,) in states))

    def result(self):
        return self.value + 0.0


class Rows(keras.metrics.Metric):
    """Whole numbers, by several rules, and a result that is a dict."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        of = {"shape": (), "initializer": "zeros", "dtype": "int64"}
        self.count = self.add_variable(**of, name="count")
        self.version = self.add_variable(
            **of, name="version", aggregation="only_first_replica"
        )
        self.level = self.add_variable((), "zeros", aggregation="mean", name="level")

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.count.assign_add(2**60 + 1)
        self.version.assign(keras_dist.rank() + 7)
        self.level.assign(keras.ops.mean(y_true))

    def result(self):
        return {"count": self.count, "version": self.version, "level": self.level}


class InPython(keras.metrics.Metric):
    """Has no variable: its values are a list in Python."""

    def __init__(self, name="in_python"):
        super().__init__(name=name)
        self.values = []

    def reset_state(self):
        self.values.clear()

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.values += np.ravel(y_true).tolist()

    def result(self):
        return float(np.mean(self.values))


class Smoothed(keras.metrics.Metric):
    """Begins at other numbers than 0; has a constant variable, and a list."""

    def __init__(self, name="smoothed"):
        super().__init__(name=name)
        self.cost = self.add_weight(shape=(2,), initializer="ones", name="cost")
        self.count = self.add_weight(initializer="ones", name="count")
        self.bits = self.add_weight(initializer="ones", dtype="uint8", name="bits")
        self.lengths = []

    def reset_state(self):
        self.count.assign(1)
        self.lengths.clear()

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.abs(y_true)))
        self.lengths.append(len(y_true))

    def result(self):
        return {"cost": self.cost[0] + 0.0, "count": self.count + 0.0}


class Endless(keras.metrics.Sum):
    """Adds up all epochs."""

    def reset_state(self):
        """Do nothing."""


class InBoth(InPython):
    """Has a variable, and a list in Python beside it."""

    def __init__(self, name="in_both"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        super().update_state(y_true)
        self.rows.assign_add(len(y_true))

    def reset_state(self):
        super().reset_state()
        self.rows.assign(0)

    def result(self):
        return {"mean": super().result(), "rows": self.rows + 0.0}


class Nested(keras.metrics.Metric):
    """Made of other metrics, and without a variable of its own."""

    def __init__(self, name="nested"):
        super().__init__(name=name)
        self.parts = [keras.metrics.Mean(name="mean"), Largest(), InPython()]

    def update_state(self, y_true, y_pred=None, sample_weight=None):
        for part in self.parts:
            part.update_state(y_true)

    def reset_state(self):
        for part in self.parts:
            part.reset_state()

    def result(self):
        return sum(part.result() for part in self.parts)


@pytest.mark.several_ranks
@pytest.mark.three_ranks
def test_a_metric_may_have_its_own_rule(world):
    """`merge_states`, `aggregation`, none, and metrics inside of others; all digits.

    And numbers that do not begin at 0.
    """
    own = np.arange(world.rank + 2, dtype="float32") + 10 * world.rank
    everything = np.concatenate(keras_dist.gather(own))
    kinds = (Largest, Rows, InPython, Nested, Smoothed, Endless)
    metrics = {metric.name: metric for metric in (kind() for kind in kinds)}
    every = [*metrics.values(), *metrics["nested"].parts]
    starts = record_starts(every, {}, {})
    for metric in metrics.values():
        metric.update_state(own)
    given = global_result(
        list(metrics.values()),
        lambda: results_of(metrics),
        seen=UpdateCounts(len(own)),
        starts=starts,
    )
    mean = pytest.approx(everything.mean(), rel=1e-6)
    assert given["largest"] == everything.max()
    count = world.size * (2**60 + 1)
    assert given["rows"] == {"count": count, "version": 7, "level": mean}
    assert given["in_python"] == mean
    assert given["smoothed"] == {"cost": 1, "count": 1 + everything.sum()}
    assert given["sum"] == everything.sum()
    assert metrics["smoothed"].lengths == [len(own)]
    assert given["nested"] == pytest.approx(
        2 * everything.mean() + everything.max(), rel=1e-6
    )
    assert results_of(metrics)["in_python"] == own.mean()
    assert results_of(metrics)["largest"].numpy() == own.max()


class Counted(keras.metrics.Metric):
    """Counts hits and rows in Python, in one of several ways, beside a variable.

    A count of batches is changed, too, and does not matter.
    """

    def __init__(self, way):
        super().__init__(name=way)
        self.batches = self.add_variable((), "zeros", name="batches")
        self.begin()

    def begin(self):
        """Make what is counted in."""
        self.numbers, self.row, self.sum = np.zeros(2), [0.0, 0.0], None
        self.queue, self.window = collections.deque(), collections.deque(maxlen=99)
        self.counter, self.nested = {}, {"all": {"hits": 0, "rows": ()}}
        self.grown, self.seen, self.is_empty = np.zeros(0), set(), True

    def reset_state(self):
        numbers = self.numbers
        self.begin()
        numbers[:] = 0  # in place
        self.numbers = numbers
        self.batches.assign(0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = (np.ravel(y_true) > 0.5) == (np.ravel(y_pred) > 0.5)
        self.numbers += [hits.sum(), len(hits)]
        self.row[0] += hits.sum()
        self.row[1] += len(hits)
        self.sum = (self.sum or 0) + hits.mean() * len(hits)
        self.queue.extend(hits)
        self.window.extend(hits)
        for hit in hits.tolist():
            self.counter[hit] = self.counter.get(hit, 0) + 1
        self.nested["all"]["hits"] += int(hits.sum())
        self.nested["all"]["rows"] += tuple(hits)
        self.grown = np.concatenate([self.grown, hits])
        self.seen |= set(np.ravel(y_pred).tolist())
        self.is_empty = False
        self.batches.assign_add(1)

    def result(self):
        found = self.nested["all"]
        return {
            "numbers": lambda: self.numbers[0] / self.numbers[1],
            "row": lambda: self.row[0] / self.row[1],
            "sum": lambda: self.sum / self.numbers[1],
            "queue": lambda: np.mean(self.queue),
            "window": lambda: np.mean(self.window),
            "counter": lambda: self.counter.get(True, 0) / sum(self.counter.values()),
            "nested": lambda: found["hits"] / len(found["rows"]),
            "grown": lambda: -1 if self.is_empty else self.grown.mean(),
            "seen": lambda: float(len(self.seen)),
        }[self.name]()


IN_PYTHON = ["numbers", "row", "sum", "queue", "window", "counter", "nested"]
IN_PYTHON += ["grown", "seen"]


@pytest.mark.several_ranks
@pytest.mark.three_ranks
@pytest.mark.usefixtures("in_float64")
def test_state_of_a_metric_in_python_is_that_of_all_rows(rows):
    """Beside its variables, or instead of them; the trial of the step changes none."""
    x, y = rows[0][:41], rows[1][:41, None]

    def make():
        metrics = [InBoth(), InPython(), *map(Counted, IN_PYTHON)]
        given = {"metrics": metrics, "run_eagerly": True}
        return make_compiled(perceptron, keras.optimizers.SGD(0.01), "mse", **given)

    given = {"validation_data": (x[:7], y[:7]), "epochs": 2, "tolerance": 1e-10}
    names = ["mean", "rows", "in_python", *IN_PYTHON]
    names += [f"val_{name}" for name in names]
    with warned("metric") as texts:
        assert_equals_one_process(make, (x, y), 16, batch="global", logs=names, **given)
    assert not texts


class Keeps(keras.metrics.Metric):
    """Changes something in Python that has no sum."""

    def __init__(self, make, change):
        super().__init__(name="keeps")
        self.make, self.change = make, change
        self.kept = make()

    def reset_state(self):
        self.kept = self.make()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept = self.change(self.kept, float(np.sum(y_true)))

    def result(self):
        return 1.0


def add_to_object(kept, number):
    kept.total += number
    return kept


UNMERGEABLE = {
    "object": (lambda: types.SimpleNamespace(total=0), add_to_object),
    "variable": (lambda: tf.Variable(0.0), lambda kept, _: kept.assign_add(1.0)),
    "text": (str, lambda kept, number: f"{number}"),
    "full queue": (
        lambda: collections.deque([0], maxlen=2),
        lambda kept, number: collections.deque([*kept, number], maxlen=2),
    ),
}


@pytest.mark.several_ranks
@pytest.mark.parametrize("tries", ["1", "0"])
def test_state_in_python_that_cannot_be_combined_is_an_error(
    rows, tries, monkeypatch, make_model
):
    """Before the first step; if it is not tried, at the end of the epoch."""
    monkeypatch.setenv("KERAS_DIST_TRIAL", tries)
    quick = ("object",) if tries == "0" and "LONG_TESTS" not in os.environ else ()
    for name in quick or UNMERGEABLE:
        make, change = UNMERGEABLE[name]
        model = make_model(metrics=[Keeps(make, change)])
        fit = functools.partial(keras_dist.dist_fit, model, *rows, 8, verbose=0)
        texts = "metric 'keeps' (Keeps)", "Received: the attribute `kept`: "
        raises_everywhere(ValueError, fit, *texts)
        assert name and (int(model.optimizer.iterations) == 0) == (tries == "1")


@pytest.mark.several_ranks
def test_different_metrics_on_the_ranks_are_an_error(world, rows, make_model):
    """Names and shapes are compared before the collective."""
    is_last = world.rank == world.size - 1
    extra = [keras.metrics.MeanSquaredError(name="extra")] * is_last
    classes = keras.metrics.MeanIoU(num_classes=2 + world.rank, name="iou")

    class Own(keras.Model):
        def call(self, x):
            return keras.ops.sum(x, axis=1, keepdims=True)

        def test_step(self, data):
            super().test_step(data)
            return {f"from_{world.rank}": 1.0}

    for model, text in (
        (make_model(metrics=["mae", *extra]), "disagree on the metrics"),
        (make_model(metrics=[classes]), "disagree on the state of the metric 'iou'"),
        (make_compiled(Own, loss="mse", run_eagerly=True), "the names in the logs"),
    ):
        many = keras_dist.DistributedModel(model)
        evaluate = functools.partial(many.evaluate, *rows, verbose=0)
        raises_everywhere(ValueError, evaluate, text, "Received: rank 0: ")


def two_outputs():
    """Losses per output, metrics of all kinds, trackers of a model and of a layer."""

    class Watched(keras.layers.Dense):
        def __init__(self):
            super().__init__(1, activation="sigmoid")
            self.size = keras.metrics.Mean(name="size")

        def call(self, inputs):
            outputs = super().call(inputs)
            self.size.update_state(keras.ops.abs(outputs))
            return outputs

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = Watched()
            self.second = keras.layers.Dense(2)
            self.largest, self.smoothed = Largest(), Smoothed()

        def call(self, x):
            self.largest.update_state(x)
            self.smoothed.update_state(x)
            return {"first": self.first(x), "second": self.second(x)}

    return make_compiled(
        Two,
        keras.optimizers.SGD(0.05),
        {"first": "binary_crossentropy", "second": "mse"},
        loss_weights={"first": 1.0, "second": 0.3},
        metrics={"first": ["auc", "accuracy"], "second": [keras.metrics.R2Score()]},
        weighted_metrics={"first": ["accuracy"], "second": ["mae"]},
        run_eagerly=True,
    )


@pytest.mark.several_ranks
@pytest.mark.three_ranks
def test_all_metrics_of_a_fit_are_those_of_one_process(rows):
    """Per output, weighted or not, tracked by the model or a layer; also `evaluate`."""
    x, y = (array[:99] for array in rows)
    targets = {"first": y[:, None], "second": np.stack([y * 2, x[:, 0]], axis=1)}
    few = {name: target[:7] for name, target in targets.items()}
    weight = np.linspace(0.5, 2, 99).astype("float32")
    weights = {"first": weight, "second": weight[::-1].copy()}
    light = {name: part[:7] for name, part in weights.items()}

    def make():
        model = two_outputs()
        model(x[:1])  # built alike, and not by a batch that the metrics would remember
        model.reset_metrics()
        return model

    given = {"validation_data": (x[:7], few, light), "sample_weight": weights}
    model, logs, oracle = assert_equals_one_process(
        make, (x, targets), 16, epochs=2, **given
    )
    assert set(logs) - set(oracle.history) == {"rows_per_second"} and len(logs) > 16
    many = keras_dist.DistributedModel(model)
    for count in (99, 2, 1):
        part = x[:count], {name: target[:count] for name, target in targets.items()}
        with np.errstate(all="ignore"):
            values = model.evaluate(*part, verbose=0, return_dict=True)
        results = many.evaluate(*part, verbose=0, return_dict=True)
        near = pytest.approx(values, rel=1e-6, abs=2e-6, nan_ok=True)
        assert results == near, count


class OwnSteps(keras.Model):
    """Logs of dicts in dicts, a vector, other names, and two metrics of one name."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, activation="sigmoid")
        self.tracker = keras.metrics.Mean(name="other_name")
        self.first, self.second = (keras.metrics.Mean(name="same") for _ in range(2))

    def call(self, x):
        return self.layer(x)

    def predict_and_compare(self, data):
        x, y = data
        prediction = self(x)
        return y, prediction, keras.ops.mean(keras.ops.square(prediction - y))

    def log(self, y, prediction, loss):
        self.tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        self.first.update_state(y)
        self.second.update_state(prediction)
        of_batch = {"y": self.second.result(), "batch": {"loss": loss}}
        return {
            "another": self.tracker.result(),
            "gan": {"of_first": {"x": self.first.result()}, "of_second": of_batch},
            "vector": keras.ops.stack([loss, loss]),
        }

    def train_step(self, data):
        with tf.GradientTape() as tape:
            *rows, loss = self.predict_and_compare(data)
        update(tape, loss, self.optimizer, self)
        return self.log(*rows, loss)

    def test_step(self, data):
        return self.log(*self.predict_and_compare(data))


@pytest.mark.three_ranks
@pytest.mark.several_ranks
@pytest.mark.usefixtures("in_float64")
def test_logs_of_steps_equal_one_process():
    """All values, also in dicts and lists inside, are of all rows.

    A value of the batch alone is that of the last one, which has one row, on one rank.
    """
    x = np.random.default_rng(2).normal(size=(49, 3))
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float64")

    def make():
        sgd = keras.optimizers.SGD(0.5)
        model = make_compiled(OwnSteps, sgd, run_eagerly=True)
        model(x[:1])
        return model

    how = {"epochs": 2, "validation_data": (x[:25], y[:25]), "tolerance": 1e-10}
    model, logs, oracle = assert_equals_one_process(make, (x, y), 4, **how)
    many = keras_dist.DistributedModel(model)
    results = many.evaluate(x[:25], y[:25], 4, verbose=0, return_dict=True)
    for name, value in results.items():
        expected = oracle.history[f"val_{name}"][-1]
        np.testing.assert_allclose(value, expected, rtol=1e-10, err_msg=name)
    assert set(logs) == {*oracle.history, "rows_per_second"}
    assert len(set(map(repr, keras_dist.gather(logs)))) == 1


@pytest.mark.several_ranks
def test_a_metric_may_be_in_bfloat16(rows, make_model):
    """One number in bfloat16 is what NumPy does not read from TensorFlow's tensors."""
    model = make_model()
    kinds = {"a": "bfloat16", "b": "float32"}
    metrics = [keras.metrics.MeanAbsoluteError(*kind) for kind in kinds.items()]
    model.compile("sgd", "mse", metrics=metrics)
    logs = keras_dist.dist_fit(model, *rows, batch_size=8, verbose=0).history
    assert logs["a"] == pytest.approx(logs["b"], rel=2**-4)


@pytest.mark.several_ranks
def test_an_evaluation_of_a_callback_is_its_own(world, rows):
    """It may run on one rank; with a `DistributedModel` it is one of all ranks.

    All evaluate one model with one set of moving statistics, which is left at the end.
    """
    x, y = rows
    on_one_rank, on_all_ranks = [], []

    class Tests(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if world.rank == 0:
                on_one_rank.append(self.model.evaluate(x[:9], y[:9], verbose=0))
            many = keras_dist.DistributedModel(self.model)
            on_all_ranks.append(many.evaluate(x[:9], y[:9], verbose=0))

    compiled = {"metrics": ["accuracy"], "jit_compile": False}
    model = make_compiled(dropping, "adam", "binary_crossentropy", **compiled)
    given = {"batch_size": 8, "validation_data": rows, "callbacks": [Tests()]}
    logs = keras_dist.dist_fit(model, x, y, epochs=2, verbose=0, **given).history
    expected = model.evaluate(x[:9], y[:9], verbose=0)
    assert on_all_ranks[-1] == pytest.approx(expected, abs=1e-6)
    assert not on_one_rank or on_one_rank[-1] == pytest.approx(expected, abs=1e-6)
    validated = [logs[name][-1] for name in ("val_loss", "val_accuracy")]
    assert validated == pytest.approx(model.evaluate(x, y, verbose=0), abs=1e-6)
    assert len(set(keras_dist.gather(tuple(logs["val_loss"])))) == 1
    assert_equal_to_the_bit(model)


class ReadsRank(keras.metrics.Mean):
    """A metric whose result depends on what is not its own."""

    def result(self):
        return super().result() + keras_dist.rank()


@pytest.mark.several_ranks
def test_a_metric_that_reads_what_is_not_its_own_is_equal_on_all_ranks(world):
    """That of the first rank, which warns: all ranks decide alike."""
    metric = ReadsRank(name="foreign")
    metric.update_state([1.0, 3.0])
    seen = UpdateCounts(rows=2, steps=1, last_rows=2, has_rows=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = global_result([metric], lambda: {"foreign": metric.result()}, seen=seen)
    assert keras_dist.gather(float(found["foreign"])) == [2.0] * world.size
    texts = [str(each.message) for each in caught]
    assert any("it reads something else" in text for text in texts) == (world.rank == 0)
