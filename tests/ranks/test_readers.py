"""Data that changes while it is read: generators, random loaders, caches in files."""

import itertools
import threading

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from harness.claims import assert_equals_one_process, shortened, slow_on_three
from harness.data_kinds import Listed, Sequence
from harness.models import make_compiled

import keras_dist

pytestmark = pytest.mark.several_ranks


def make_model(columns=3, *, sparse=False):
    def make():
        inputs = keras.Input((columns,), sparse=sparse)
        return keras.Model(inputs, keras.layers.Dense(1)(inputs))

    how = {"weighted_metrics": ["mae"], "run_eagerly": True}
    return make_compiled(make, keras.optimizers.SGD(0.1), "mse", **how)


def endless(rows, batch):
    """Batches of `rows` rows over and over, from where the last one ended."""
    x = np.random.default_rng(1).normal(size=(rows, 3))
    begin = 0
    while True:
        own = x[np.arange(begin, begin + batch) % rows]
        begin += batch
        yield own, own.sum(axis=1)


def trained(is_ours, model, *args, **arguments):
    options = {"batch": "global"} if is_ours else {}
    fit = keras_dist.dist_fit if is_ours else keras.Model.fit
    return fit(model, *args, verbose=0, **options, **arguments).history


def batches_at(*numbers):
    """Some batches of `endless`, for plain Keras: what it reads ahead varies."""
    batches = list(itertools.islice(endless(16, 6), max(numbers) + 1))
    return (batches[number] for number in numbers)


# The batches of three evaluations: those that are looked at come again, and one that
# was read ahead is lost.
READ = {
    1: [(0,), (0,), (0,)],
    2: [(0, 1), (0, 1), (0, 1)],
    4: [(0, 1, 2, 3), (0, 1, 5, 6), (0, 1, 8, 9)],
    5: [(0, 1, 2, 3, 4), (0, 1, 6, 7, 8), (0, 1, 10, 11, 12)],
}


@slow_on_three
@pytest.mark.parametrize("steps", shortened(READ, {4}))
def test_validation_by_a_generator_goes_on_from_epoch_to_epoch(steps):
    """It is not closed after the first pass."""
    x = np.random.default_rng(0).normal(size=(24, 3))
    arguments = {"batch_size": 8, "shuffle": False}
    validation, model = endless(16, 6), make_model()
    more = {"epochs": 3, "validation_data": validation, "validation_steps": steps}
    found = trained(True, model, x, x.sum(axis=1), **more, **arguments)
    next(validation)
    model = make_model()
    for epoch, numbers in enumerate(READ[steps]):
        trained(False, model, x, x.sum(axis=1), **arguments)
        loss, mae = model.evaluate(batches_at(*numbers), verbose=0)
        ours = found["val_loss"][epoch], found["val_mae"][epoch]
        np.testing.assert_allclose(ours, (loss, mae), rtol=1e-5)


@slow_on_three
def test_a_generator_serves_several_fits_and_evaluations():
    """Each goes on where the one before it ended, but for a batch read ahead."""
    model, data, losses = make_model(), endless(16, 6), []
    for epoch in range(3):
        arguments = {"epochs": epoch + 1, "initial_epoch": epoch}
        losses += trained(True, model, data, steps_per_epoch=4, **arguments)["loss"]
    ours = keras_dist.DistributedModel(model, batch="global")
    losses += [ours.evaluate(data, steps=3, verbose=0)[0] for _ in range(2)]
    predicted = ours.predict(data, steps=3, verbose=0)
    assert predicted.shape == (18, 1)

    model, expected = make_model(), []
    for begin in (0, 5, 10):
        expected += trained(False, model, batches_at(*range(begin, begin + 4)))["loss"]
    for begin in (15, 19):
        numbers = range(begin, begin + 3)
        expected += model.evaluate(batches_at(*numbers), verbose=0)[:1]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    x = np.concatenate([x for x, _ in batches_at(23, 24, 25)])
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), rtol=1e-3)


class Counts(keras.callbacks.Callback):
    """Counts the steps."""

    def __init__(self):
        super().__init__()
        self.steps = threading.Semaphore(0)

    def on_train_batch_end(self, batch, logs=None):
        self.steps.release()


@slow_on_three
def test_a_generator_may_wait_for_a_callback():
    """No batch is asked for before the step that it depends on is done."""
    callback = Counts()

    def wait():
        yield from itertools.islice(endless(16, 6), 2)
        assert callback.steps.acquire(timeout=30)
        for batch in endless(16, 6):
            assert callback.steps.acquire(timeout=30)
            yield batch

    arguments = {"steps_per_epoch": 3, "epochs": 2, "callbacks": [callback]}
    assert len(trained(True, make_model(), wait(), **arguments)["loss"]) == 2


class Shuffled(Sequence):
    """Batches of twelve rows, shuffled by NumPy's generator after each epoch."""

    def __init__(self, rows):
        self.x = np.random.default_rng(2).normal(size=(rows, 3))
        super().__init__(self.x, self.x.sum(axis=1), [12])

    def on_epoch_end(self):
        self.x = np.random.permutation(self.x)  # batches of before stay what they are
        self.batches = Sequence(self.x, self.x.sum(axis=1), [12]).batches


@pytest.mark.three_ranks
@pytest.mark.parametrize("count", shortened([1, 2, 3], {2}))
def test_validation_may_have_fewer_batches_than_ranks(count):
    """All ranks call the user's `on_epoch_end` as often, which draws random numbers."""

    def data(_):
        np.random.seed(5)
        return {"x": Shuffled(48), "validation_data": Shuffled(12 * count)}

    assert_equals_one_process(make_model, data, batch="global", epochs=3)


class Simulated(Listed):
    """Draws its batches."""

    def __getitem__(self, index):
        x = np.random.normal(size=(12, 3))
        return x, x.sum(axis=1)


@slow_on_three
def test_looks_at_first_batches_draw_nothing():
    """A sequence that simulates its batches trains on one process's."""

    def data(_):
        np.random.seed(5)
        return Simulated(range(4))

    assert_equals_one_process(make_model, data, batch="global")


@slow_on_three
@pytest.mark.parametrize("name", ["training", "validation"])
def test_ranks_of_a_host_do_not_cache_in_one_file(folder, world, name):
    """It is an error before training; a complete file is read by all."""
    x = np.ones((12, 3), "float32")

    def data(file=None):
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, 0])).batch(3)
        return rows if file is None else rows.cache(f"{folder}/{name}-{file}")

    def train(cached):
        given = (data(), cached) if name == "validation" else (cached, None)
        model = make_model()
        keras_dist.dist_fit(model, given[0], validation_data=given[1], verbose=0)

    with pytest.raises(ValueError, match="in the same file. Received: cache"):
        train(data("one"))
    train(data(f"rank {world.rank}"))
    if world.rank == 0:
        list(data("one"))
    keras_dist.broadcast(None)
    train(data("one"))


@pytest.mark.three_ranks
@pytest.mark.parametrize("batch", shortened(["global", "rank"], {"global"}))
def test_sparse_matrices_of_scipy_are_sharded_by_row(world, batch):
    """In training, validation, evaluation and prediction, as on one process."""
    matrix = scipy.sparse.random(46, 5, 0.4, "csr", "float32", random_state=1)
    y = np.asarray(matrix.sum(axis=1)).ravel()
    given = {"validation_split": 0.2, "sample_weight": np.arange(46.0)}
    count = 6 if batch == "global" else 6 // world.size
    made, given["batch"] = (lambda: make_model(5, sparse=True)), batch
    model, *_ = assert_equals_one_process(made, (matrix, y), count, **given)
    many = keras_dist.DistributedModel(model, batch=batch)
    found, wanted = (
        [*each.evaluate(matrix, y, 7, 0), *each.predict(matrix, verbose=0).ravel()]
        for each in (many, model)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
