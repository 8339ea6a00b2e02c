"""`microbatch` on several ranks: the pieces of all ranks are the global batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import EXACT, assert_equal_to_the_bit, largest_difference, models_in

import keras_dist
from keras_dist.training.session import session_of

pytestmark = pytest.mark.several_ranks

_WORDS = 8


def tagger(*more):
    """A model whose loss and metric are of the words that are no padding.

    It may have more layers before the last one.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Embedding(_WORDS, 4, mask_zero=True),
            keras.layers.Dense(3, activation="tanh", kernel_regularizer="l2"),
            *more,
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, clipnorm=0.1),
        "mse",
        weighted_metrics=["mae"],
        jit_compile=False,
    )
    return model


def words(count):
    """Rows of words, and a value for each word."""
    generator = np.random.default_rng(1)
    x = generator.integers(1, _WORDS, size=(count, 6))
    x[:, 4:] *= generator.random((count, 1)) > 0.5
    return x, generator.normal(size=(count, 6, 1))


@pytest.mark.parametrize(
    "leftover", ["cut", pytest.param("whole", marks=pytest.mark.long)]
)
def test_masks_and_ragged_batches_equal_one_process(world, leftover):
    """Ranks have other numbers of pieces, and one has no rows in the last step."""
    with models_in("float64"):
        x, y = words(16 * world.size + 3)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        arguments = {"epochs": 2, "verbose": 0}
        oracle = tagger()
        expected = oracle.fit(data.batch(8 * world.size), **arguments)
        model = tagger()
        history = keras_dist.dist_fit(
            model,
            data.batch(8),
            microbatch=3,
            lr_scaling="none",
            leftover=leftover,
            **arguments,
        )
        assert largest_difference(model, oracle) < EXACT
    assert_equal_to_the_bit(model)
    for metric, values in expected.history.items():
        assert history.history[metric] == pytest.approx(values, abs=EXACT), metric


@pytest.mark.parametrize(
    "is_eager", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_local_steps_in_pieces_are_local_steps(world, is_eager):
    """With `sync="every:2"` too, a rank's step is that on its whole batch."""
    trained = []
    for microbatch in (None, 3):
        with models_in("float64"):
            model = tagger()
            x, y = words(8 * world.size * 3)
            keras_dist.dist_fit(
                model,
                x,
                y,
                batch_size=8,
                sync="every:2",
                microbatch=microbatch,
                shuffle=False,
                verbose=0,
            )
        trained.append(model)
    assert largest_difference(*trained) < EXACT
    assert_equal_to_the_bit(trained[1])


def test_a_batch_that_is_not_finite_is_left_out(world, make_model, rows, tmp_path):
    """`NanReport` sees the gradients of all pieces, and names the row."""
    x, y = np.array(rows[0][:48]), rows[1][:48]
    x[29] = np.nan  # in one piece of one rank
    report = keras_dist.NanReport("skip", folder=tmp_path)
    model = make_model(run_eagerly=False, jit_compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keras_dist.dist_fit(
            model,
            x,
            y,
            batch_size=8,
            microbatch=3,
            callbacks=[report],
            shuffle=False,
            verbose=0,
        )
    [found] = report.found
    assert found.rows == (29,)
    assert np.isfinite(model.get_weights()[0]).all()
    assert_equal_to_the_bit(model)


class TwoUpdates(keras.Model):
    """A step of two updates, on one rank alone."""

    def __init__(self, count):
        super().__init__()
        self.dense, self.count = keras.layers.Dense(1), count
        self.compile("sgd", jit_compile=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for _ in range(self.count):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x)[:, 0] - y) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"of_batch": loss}


def test_a_step_that_cannot_be_divided_is_an_error_on_all_ranks(world, rows):
    """Also if it is one on a single rank: the others do not wait for it."""
    model = TwoUpdates(2 if world.rank == world.size - 1 else 1)
    with pytest.raises(ValueError, match="makes 2 updates, not one"):
        keras_dist.dist_fit(model, *rows, batch_size=8, microbatch=3, verbose=0)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match="The ranks disagree on `microbatch`"):
        own = 3 + world.rank
        keras_dist.dist_fit(TwoUpdates(1), *rows, microbatch=own, verbose=0)


class Hungry(keras.layers.Layer):
    """Runs out of memory where a batch has more than `limit` rows."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.supports_masking = limit, True

    def call(self, x):
        def needed(rows):
            if rows > self.limit:
                raise MemoryError  # TensorFlow makes a ResourceExhaustedError of it
            return np.int32(0)

        found = tf.numpy_function(needed, [tf.shape(x)[0]], tf.int32, stateful=False)
        return x + tf.cast(tf.ensure_shape(found, []), x.dtype)


@pytest.mark.parametrize(
    "kind", ["batches", pytest.param("without an end", marks=pytest.mark.long)]
)
def test_one_rank_runs_out_of_memory_and_all_halve_their_pieces(world, kind):
    """In a later, larger batch too; before any rank waits for the update of others."""
    with models_in("float64"):
        x, y = words(40 * world.size)
        # The first batch has four rows for each rank, the second has nine.
        ends = np.cumsum([4, 9, 3, 8, 9]) * world.size
        batches = list(zip(np.split(x, ends), np.split(y, ends), strict=True))
        specs = (
            tf.TensorSpec([None, 6], tf.int64),
            tf.TensorSpec([None, 6, 1], tf.float64),
        )
        data = tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=specs
        )
        if kind == "batches":
            data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
        arguments = {"epochs": 2, "verbose": 0}
        oracle = tagger()
        expected = oracle.fit(data, **arguments)
        model = tagger(Hungry(5 if world.rank == world.size - 1 else 99))
        history = keras_dist.dist_fit(
            model, data, batch="global", microbatch="auto", **arguments
        )
        assert largest_difference(model, oracle) < EXACT
    assert_equal_to_the_bit(model)
    assert int(session_of(model).microbatch.rows) == 5
    for metric, values in expected.history.items():
        assert history.history[metric] == pytest.approx(values, abs=EXACT), metric
    model = tagger(Hungry(0 if world.rank == world.size - 1 else 99))
    with pytest.raises(MemoryError, match=f"on rank {world.size - 1}"):
        keras_dist.dist_fit(model, x, y, batch_size=2, microbatch="auto", verbose=0)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.several_ranks
@pytest.mark.parametrize("microbatch", [3, "auto"])
def test_slices_of_an_embedding_are_accumulated_over_pieces_and_steps(
    world, microbatch
):
    """Two batches make an update; with `"auto"`, memory runs out on one rank."""
    trained = []
    for rows in (None, microbatch):
        with models_in("float64"):
            is_short = rows == "auto" and world.rank == world.size - 1
            model = tagger(Hungry(5 if is_short else 99))
            model.compile(
                keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
                "mse",
                weighted_metrics=["mae"],
                jit_compile=False,
            )
            x, y = words(8 * world.size * 3 + 4)
            options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
            keras_dist.dist_fit(model, x, y, microbatch=rows, **options)
        trained.append(model)
    assert largest_difference(*trained) < EXACT
    assert_equal_to_the_bit(trained[1])
