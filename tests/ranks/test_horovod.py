"""`keras_dist.horovod` does what Horovod's Keras module does on Keras 2.

The oracle is plain Keras on one process, with the gradients of all ranks, each of which
counts the same.
"""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist
import keras_dist.horovod as hvd

# On three ranks, all of them with LONG_TESTS=1, and those that are marked always.
_IS_LONG = os.environ.get("LONG_TESTS")
pytestmark = pytest.mark.three_ranks if _IS_LONG else pytest.mark.several_ranks


def make(seed=3, *, layers=None):
    """A small model that is built."""
    keras.utils.set_random_seed(seed)
    dense = layers or [keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *dense])


def rows_of(rank, *, count=24, step=0):
    """Rows of one rank."""
    generator = np.random.default_rng(100 * step + rank)
    x = generator.normal(size=(count, 5)).astype("float32")
    return x, x.sum(axis=1, keepdims=True).astype("float32")


def gradients_of(model, x, y):
    """Gradients of the mean squared error of some rows."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def by_hand(
    model,
    optimizer,
    *,
    batch=8,
    epochs=1,
    passes=1,
    is_mean=False,
    is_sum=False,
    counts=None,
):
    """Train on the batches of all ranks in one process, as Horovod would."""
    size = hvd.size()
    counts = counts or [24] * size
    data = [rows_of(rank, count=counts[rank]) for rank in range(size)]
    optimizer.build(model.trainable_variables)
    added, number = None, 0
    for _ in range(epochs):
        for start in range(0, min(counts), batch):
            per_rank = [
                gradients_of(model, x[start : start + batch], y[start : start + batch])
                for x, y in data
            ]
            step = [sum(of_ranks) for of_ranks in zip(*per_rank, strict=True)]
            added = (
                step
                if added is None
                else [a + b for a, b in zip(added, step, strict=True)]
            )
            number += 1
            if number % passes:
                optimizer._iterations.assign_add(1)
                continue
            divisor = (1 if is_sum else size) * (passes if is_mean else 1)
            mean = [gradient / divisor for gradient in added]
            optimizer.apply(mean, model.trainable_variables)
            added = None
    return model


def fit(model, optimizer, *, batch=8, epochs=1, rank=None, count=24, **kwargs):
    """Train on this rank's rows as a script of Horovod does."""
    x, y = rows_of(hvd.rank() if rank is None else rank, count=count)
    compiled = {"loss": "mse", **kwargs.pop("compiled", {})}
    compiled.setdefault("run_eagerly", True)
    model.compile(optimizer, **compiled)
    arguments = {"batch_size": batch, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **{**arguments, **kwargs})


def assert_close(model, expected, tolerance=1e-5):
    """Weights are equal but for roundings."""
    for own, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance / 10)


def assert_equal_on_all(model):
    """All ranks have the same bits."""
    for weights in keras_dist.gather(model.get_weights())[1:]:
        for own, first in zip(weights, model.get_weights(), strict=True):
            assert hvd.size() == 1 or own.shape == first.shape
    sums = keras_dist.gather([float(np.sum(w, dtype="float64")) for w in model.weights])
    assert all(found == sums[0] for found in sums)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.05, clipnorm=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_averaged(name):
    """In a compiled step; clipping sees the average."""
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name]())
    model = make()
    fit(model, optimizer, epochs=2, compiled={"run_eagerly": name != "adam"})
    assert_close(model, by_hand(make(), OPTIMIZERS[name](), epochs=2))
    assert_equal_on_all(model)


@pytest.mark.three_ranks
def test_each_rank_counts_the_same():
    """Ranks have different numbers of rows in a batch."""
    counts = [8 + 4 * rank for rank in range(hvd.size())]
    own = counts[hvd.rank()]
    model = make()
    fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)),
        batch=own,
        count=own,
    )
    expected = make()
    per_rank = [
        gradients_of(expected, *rows_of(rank, count=counts[rank]))
        for rank in range(hvd.size())
    ]
    mean = [sum(found) / hvd.size() for found in zip(*per_rank, strict=True)]
    keras.optimizers.SGD(0.05).apply(mean, expected.trainable_variables)
    assert_close(model, expected)


def test_gradients_are_summed():
    """`op=Sum`, also with what changes only how numbers are sent."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.02),
        op=hvd.Sum,
        name="mine",
        device_dense="/cpu:0",
        gradient_predivide_factor=2.0,
        groups=2,
    )
    model = make()
    fit(model, optimizer)
    assert_close(model, by_hand(make(), keras.optimizers.SGD(0.02), is_sum=True))


@pytest.mark.parametrize(("is_mean", "run_eagerly"), [(False, False), (True, True)])
def test_gradients_of_batches_are_added(is_mean, run_eagerly):
    """Divided by their number only if asked; `iterations` counts batches."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01),
        backward_passes_per_step=2,
        average_aggregated_gradients=is_mean,
    )
    model = make()
    fit(model, optimizer, batch=4, epochs=2, compiled={"run_eagerly": run_eagerly})
    expected = keras.optimizers.Adam(0.01)
    options = {"batch": 4, "epochs": 2, "passes": 2, "is_mean": is_mean}
    assert_close(model, by_hand(make(), expected, **options))
    assert int(optimizer.iterations) == int(expected.iterations) == 12


def test_an_inf_is_forgotten_after_its_update():
    """It is in the sum of one update, and not in the next one's."""
    weight = keras.Variable([1.0, 1.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2
    )
    for gradient in ([np.inf, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]):
        optimizer.apply([tf.constant(gradient)], [weight])
    assert not np.isfinite(weight.numpy()[0])
    np.testing.assert_allclose(weight.numpy()[1], 0.8, rtol=1e-6)


def test_sparse_gradients_of_batches_are_added():
    """Without `sparse_as_dense`, which Horovod needs for it."""
    table = keras.Variable(np.zeros((3, 2), "float32"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2
    )
    for row in (0, 2):
        values = tf.fill([2, 2], float(hvd.rank()))
        optimizer.apply([tf.IndexedSlices(values, [row, row])], [table])
    expected = -2 * (hvd.size() - 1) / 2
    np.testing.assert_allclose(table.numpy()[:, 0], [expected, 0, expected])


def test_half_precision_rounds_once():
    """`Compression.fp16`."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=hvd.Compression.fp16
    )
    model = make()
    fit(model, optimizer)
    assert_close(model, by_hand(make(), keras.optimizers.SGD(0.05)), 2e-3)
    assert_equal_on_all(model)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_an_embedding_is_averaged(sparse_as_dense):
    """Repeated rows are added up, as Keras 2 does before each update."""

    def model_of(optimizer, x, y):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(6, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0, epochs=2)
        return model

    generator = np.random.default_rng(1)
    x = generator.integers(0, 6, (hvd.size(), 4, 3)).astype("int32")
    y = generator.normal(size=(hvd.size(), 4, 1)).astype("float32")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), sparse_as_dense=sparse_as_dense
    )
    model = model_of(optimizer, x[hvd.rank()], y[hvd.rank()])
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    expected = model_of(plain, x.reshape(-1, 3), y.reshape(-1, 1))
    assert_close(model, expected)


def test_the_optimizer_is_of_its_class_and_its_config_goes_round():
    """An Adam is an Adam, and a copy averages, too; the one that was given does not."""
    given = keras.optimizers.Adam(0.5, name="mine")
    optimizer = hvd.DistributedOptimizer(given)
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.__class__.__name__ == "Adam" and optimizer.name == "mine"
    assert float(optimizer.learning_rate) == 0.5
    config = optimizer.get_config()
    copy = type(optimizer).from_config(config)
    assert copy.get_config() == config == optimizer.from_config(config).get_config()
    assert optimizer.__class__.from_config(config).get_config() == config
    weight = keras.Variable([0.0])
    copy = type(keras_sgd := hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    copy = copy.from_config(keras_sgd.get_config())
    copy.apply([tf.constant([float(hvd.rank())])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-(hvd.size() - 1) / 2])
    weight.assign([0.0])
    given.apply([tf.constant([float(hvd.rank())])], [weight])
    assert weight.numpy()[0] <= 0
    assert int(given.iterations) == 1 and int(optimizer.iterations) == 0


def test_state_of_a_given_optimizer_is_kept():
    """Momentum and the number of updates."""
    model = make()
    given = keras.optimizers.SGD(0.1, momentum=0.9)
    fit(model, given, rank=0)
    optimizer = hvd.DistributedOptimizer(given)
    for own, other in zip(optimizer.variables, given.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@pytest.mark.three_ranks
def test_collectives_take_numbers_lists_arrays_tensors_and_variables():
    """A tensor of the same dtype comes back."""
    rank, size = hvd.rank(), hvd.size()
    mean = (size - 1) / 2
    assert float(hvd.allreduce(float(rank))) == mean
    assert hvd.allreduce([0.5, float(rank)])[1] == mean
    assert hvd.allreduce(np.float64(rank), name="score").dtype == tf.float64
    assert int(hvd.allreduce(rank, op=hvd.Sum)) == size * (size - 1) // 2
    assert int(hvd.allreduce(rank, average=False)) == size * (size - 1) // 2
    assert int(hvd.allreduce(rank, False)) == size * (size - 1) // 2
    variable = keras.Variable([float(rank)])
    assert hvd.allreduce(variable, op=hvd.Max).numpy().tolist() == [size - 1.0]
    assert float(hvd.allreduce(tf.constant(rank + 1.0), op=hvd.Min)) == 1
    assert float(hvd.allreduce(2.0, op=hvd.Product)) == 2.0**size
    scaled = hvd.allreduce(1.0, prescale_factor=2.0, postscale_factor=3.0, op=hvd.Sum)
    assert float(scaled) == 6 * size
    half = hvd.allreduce([1 / 3], compression=hvd.Compression.fp16)
    np.testing.assert_allclose(half, [1 / 3], rtol=1e-3)
    assert hvd.broadcast(rank + 7, 0, name="epoch").numpy() == 7
    assert int(hvd.broadcast(rank, root_rank=size - 1)) == size - 1
    gathered = hvd.allgather([[rank]] * (rank + 1)).numpy().ravel().tolist()
    assert gathered == [r for r in range(size) for _ in range(r + 1)]
    rows = np.arange(size * 2, dtype="float32")
    mine = hvd.reducescatter(rows * (rank + 1), op=hvd.Sum).numpy()
    total = size * (size + 1) / 2
    np.testing.assert_allclose(mine, rows[2 * rank : 2 * rank + 2] * total)
    assert [float(x) for x in hvd.grouped_allreduce([1.0, float(rank)])] == [1, mean]
    assert [x.shape[0] for x in hvd.grouped_allgather([[1], [1, 2]])] == [
        size,
        2 * size,
    ]
    assert hvd.grouped_reducescatter([rows])[0].shape == (2,)
    assert hvd.broadcast_object({"rank": rank}, 0) == {"rank": 0}
    assert hvd.allgather_object(("r", rank)) == [("r", r) for r in range(size)]
    if size > 1:
        rows = hvd.alltoall(tf.constant([[rank, other] for other in range(size)]))
        assert rows.numpy().tolist() == [[other, rank] for other in range(size)]
    with pytest.raises(ValueError, match="hvd.Adasum weighs"):
        hvd.allreduce(1.0, op=hvd.Adasum)
    with pytest.raises(ValueError, match="replaces `average`"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)


def test_horovods_numbers_of_operations_are_taken():
    """Average is 0, Sum 1, Min 3, …, as in Horovod."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    assert [getattr(hvd, name) for name in names] == list(range(6))
    rows = np.ones(hvd.size(), "float32")
    assert hvd.reducescatter(rows, op=1).numpy().tolist() == [hvd.size()]
    for op in (6, -1, True, "sum"):
        with pytest.raises(ValueError, match="`op` must be"):
            hvd.allreduce(1.0, op=op)


def test_collectives_work_in_a_graph():
    """And where the names of the layers differ."""

    @tf.function
    def graph(x):
        return hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x)

    mean, first, everyone = graph(tf.constant([float(hvd.rank())]))
    assert float(mean[0]) == (hvd.size() - 1) / 2
    assert float(first[0]) == 0 and everyone.shape[0] in (None, hvd.size())


def test_variables_are_broadcast():
    """Those of Keras and of TensorFlow."""
    variables = [keras.Variable([float(hvd.rank())]), tf.Variable(hvd.rank() + 5)]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    last = hvd.size() - 1
    assert variables[0].numpy()[0] == last and variables[1].numpy() == last + 5


@pytest.mark.several_ranks
def test_a_mismatch_is_an_error_and_not_a_hang():
    """Different shapes, different collectives, different variables, different logs."""
    with pytest.raises(ValueError, match="allreduce of float32 .2,."):
        hvd.allreduce(np.zeros(2 + hvd.rank(), "float32"))
    with pytest.raises(ValueError, match="allreduce of .* broadcast of|broadcast of"):
        hvd.allreduce(1.0) if hvd.rank() else hvd.broadcast(1.0, 0)
    with pytest.raises(ValueError, match="disagree on the collective"):
        hvd.allgather_object(1) if hvd.rank() else hvd.broadcast_object(1, 0)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
        hvd.broadcast(1.0, hvd.rank())
    with pytest.raises(ValueError, match="disagree on"):
        hvd.broadcast_variables([keras.Variable(1.0)], hvd.rank())
    with pytest.raises(ValueError, match="disagree on"):
        hvd.broadcast_variables([keras.Variable(np.zeros(2 + hvd.rank()))], 0)
    average = hvd.callbacks.MetricAverageCallback()
    with pytest.raises(ValueError, match="names in the logs"):
        average.on_epoch_end(0, {"loss": 1.0, "lr": 1.0} if hvd.rank() else {"loss": 1})


def test_what_would_make_the_ranks_differ_is_an_error():
    """Of an optimizer, a tape and a callback; it says what to do."""
    some = hvd.ProcessSet([0])
    optimizer, tape = keras.optimizers.SGD(), tf.GradientTape()
    for make_one in (
        lambda **options: hvd.DistributedOptimizer(optimizer, **options),
        lambda **options: hvd.DistributedGradientTape(tape, **options),
    ):
        with pytest.raises(ValueError, match="hvd.Adasum weighs.*op=hvd.Average"):
            make_one(op=hvd.Adasum)
        with pytest.raises(ValueError, match="All ranks train one model.*Leave it out"):
            make_one(process_set=some)
        make_one(process_set=hvd.global_process_set)
    with pytest.raises(ValueError, match="All ranks train one model"):
        hvd.callbacks.MetricAverageCallback(process_set=some)
    with pytest.raises(ValueError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [keras.Variable(1.0)])
