"""State that is not averaged as gradients are: local layers, counters, statistics."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import assert_equal_to_the_bit, raises_everywhere
from models import vectors

import keras_dist

pytestmark = pytest.mark.several_ranks


def tower(seed):
    """A layer that may be local to each rank."""
    initializer = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(4, activation="tanh", kernel_initializer=initializer)


def head():
    """The layer that all ranks train."""
    initializer = keras.initializers.GlorotUniform(seed=99)
    return keras.layers.Dense(1, kernel_initializer=initializer)


class Towers(keras.Model):
    """One process: the rows of each rank go through that rank's tower."""

    def __init__(self, size):
        super().__init__()
        self.towers = [tower(seed) for seed in range(size)]
        self.head = head()

    def call(self, inputs):
        x, rank = inputs
        outputs = [self.head(own(x)) for own in self.towers]
        chosen = tf.one_hot(rank, len(outputs))
        return keras.ops.sum(keras.ops.concatenate(outputs, axis=1) * chosen, axis=1)


@pytest.mark.parametrize(
    ("batches", "is_dataset"),
    [
        pytest.param(None, False, marks=pytest.mark.three_ranks),
        (2, False),
        (None, True),
    ],
)
def test_local_layers_train_on_the_rows_of_their_rank(world, batches, is_dataset):
    """Their gradients are parts of the loss of the global batch, on each rank.

    Of arrays the rows of all ranks are known before a step; of a data set they are not.
    """
    x, y = vectors(16 * world.size)
    data = (x, y)
    if is_dataset:
        data = (tf.data.Dataset.from_tensor_slices(data).batch(8),)

    def optimizer(rate):
        return keras.optimizers.SGD(
            rate, momentum=0.5, gradient_accumulation_steps=batches
        )

    common = {"epochs": 3, "shuffle": False, "verbose": 0}
    expected = Towers(world.size)
    expected.compile(optimizer(0.1), "mse", run_eagerly=True)
    ranks = np.arange(len(x)) // (8 if is_dataset else 1) % world.size
    expected.fit((x, ranks), y, batch_size=8 * world.size, **common)
    own, common_head = tower(world.rank), head()
    model = keras.Sequential([keras.Input((5,)), own, common_head])
    model.compile(optimizer(0.1), "mse", run_eagerly=True)
    if not is_dataset:
        common["batch_size"] = 8
    keras_dist.dist_fit(model, *data, lr_scaling="none", local_layers=[own], **common)
    for layer, oracle in (
        (own, expected.towers[world.rank]),
        (common_head, expected.head),
    ):
        for weight, other in zip(layer.weights, oracle.weights, strict=True):
            assert weight.numpy() == pytest.approx(other.numpy(), rel=1e-5, abs=1e-6)
    kernels = keras_dist.gather(own.kernel.numpy())
    assert not np.allclose(kernels[0], kernels[-1])


def test_options_that_cannot_be_used_are_errors_on_all_ranks(world, make_model, rows):
    """Each message has what was received and what to do."""
    stranger = keras.layers.Dense(1)
    for kind, text, options in (
        (ValueError, '"average", "sum" or "adasum"', {"op": "mean"}),
        (ValueError, 'None, "fp16" or "bf16"', {"compression": "int8"}),
        (ValueError, "Leave one out", {"op": "adasum", "compression": "fp16"}),
        (ValueError, "Adasum", {"op": "adasum"}),
        (ValueError, "does not have", {"local_layers": [stranger]}),
        (TypeError, "list of layers", {"local_layers": ["dense"]}),
        (ValueError, "keras_dist.init", {"process_set": [0, 1]}),
    ):
        model = make_model()

        def call(model=model, options=options):
            keras_dist.dist_fit(model, *rows, verbose=0, **options)

        if options == {"op": "adasum"} and keras_dist.comm.has_mpi():
            continue  # there it works, on two ranks
        for message in raises_everywhere(kind, call):
            assert text in message and "Received: " in message
    with pytest.raises(RuntimeError, match="first call"):
        keras_dist.init(process_sets=[[0]])
    with pytest.raises(ValueError, match="ranks from 0"):
        keras_dist.init(process_sets=[[0, world.size]])


@pytest.mark.several_ranks
def test_adasum_is_the_formula_of_its_paper(world):
    """On two ranks over MPI: the common part of two gradients is halved.

    Start it by `mpirun -np 2`, with a Horovod built by `install-horovod --mpi`.
    """
    if not keras_dist.comm.has_mpi() or world.size != 2:
        pytest.skip("Adasum needs two ranks over MPI.")
    x, y = vectors(16)

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        return model

    start = [weight.numpy() for weight in make().weights]
    steps = []
    for part in (slice(0, None, 2), slice(1, None, 2)):
        alone = make()
        alone.fit(x[part], y[part], batch_size=8, shuffle=False, verbose=0)
        after = [weight.numpy() for weight in alone.weights]
        steps.append([new - old for new, old in zip(after, start, strict=True)])
    model = make()
    keras_dist.dist_fit(
        model,
        x,
        y,
        batch_size=8,
        op="adasum",
        lr_scaling="none",
        shuffle=False,
        verbose=0,
    )
    assert_equal_to_the_bit(model)
    for weight, old, a, b in zip(model.weights, start, *steps, strict=True):
        both = (a * b).sum()
        expected = old + a * (1 - both / (a * a).sum() / 2)
        expected += b * (1 - both / (b * b).sum() / 2)
        assert weight.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-7)


class Counters(keras.layers.Layer):
    """Counts rows and steps, with each rule for state without a gradient."""

    def build(self, shape):
        def add(dtype, aggregation):
            return self.add_weight(
                shape=(),
                dtype=dtype,
                initializer="zeros",
                trainable=False,
                aggregation=aggregation,
            )

        self.rows = add("int64", "sum")
        self.total = add("float32", "sum")
        self.steps = add("int64", "mean")
        self.first = add("float32", "only_first_replica")
        self.built = True

    def call(self, x):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        self.total.assign_add(keras.ops.sum(x))
        self.steps.assign_add(1)
        self.first.assign(float(keras_dist.rank()) + 1.0)
        return x


@pytest.mark.three_ranks
def test_state_without_a_gradient_follows_its_own_rule(world):
    """`aggregation`: rows are summed over the ranks, steps are not."""
    x, y = vectors(48)
    counters = Counters()
    model = keras.Sequential([keras.Input((5,)), counters, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    before = [int(counters.rows), float(counters.total), int(counters.steps)]
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=2, verbose=0)
    assert_equal_to_the_bit(model)
    assert int(counters.rows) - before[0] == 2 * 48
    added = float(counters.total) - before[1]
    assert added == pytest.approx(2 * float(x.sum()), rel=1e-4)
    assert int(counters.steps) - before[2] == 2 * (48 // (8 * world.size))
    assert float(counters.first) == 1.0


def test_what_was_adapted_before_keeps_its_bits(world):
    """A `Normalization` layer is the same before and after."""
    x, y = vectors(48)
    layer = keras.layers.Normalization()
    layer.adapt(x)
    before = [weight.numpy() for weight in layer.weights]
    model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    keras_dist.dist_fit(model, x, y, batch_size=8, verbose=0)
    for weight, old in zip(layer.weights, before, strict=True):
        assert (weight.numpy() == old).all()


def test_accumulated_gradients_of_local_layers_go_on(tmp_path, rows, make_model):
    """Those of one rank stay its own at the end of an epoch; the others are all's."""

    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyError("died")

    def fit(model, **options):
        options |= {"batch": "global", "batch_size": 16, "shuffle": False, "epochs": 2}
        local = model.layers[-1:]
        keras_dist.dist_fit(model, *rows, local_layers=local, verbose=0, **options)
        return [np.array(variable) for variable in model.variables]

    def make():
        return make_model(keras.optimizers.Adam(0.1, gradient_accumulation_steps=4))

    folder = keras_dist.broadcast(str(tmp_path / "resume"))
    expected = fit(make())
    with pytest.raises(KeyError):
        fit(make(), resume=folder, callbacks=[Dies()])
    for own, other in zip(fit(make(), resume=folder), expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
