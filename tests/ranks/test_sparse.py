"""Rows that a batch reads repeatedly, as of an `Embedding`, as on one process.

Keras gives its optimizers one slice for each row that a batch reads. Most of them
square each slice, and clip by each; so do N ranks.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.cases import OPTIMIZERS, models_in, optimizer_names
from harness.claims import assert_close, assert_equals_one_process, difference_of_states
from harness.models import make_compiled, words

import keras_dist
from keras_dist import comm
from keras_dist.optimizer import sparse
from keras_dist.optimizer.sparse import Lookups

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
SHAPE = (9, 3)


class Cubes(keras.optimizers.Optimizer):
    """An optimizer of a user's own: SGD with the cube of each slice."""

    def update_step(self, gradient, variable, learning_rate):
        rate = keras.ops.cast(learning_rate, variable.dtype)
        cubes = keras.ops.multiply(keras.ops.square(gradient), gradient)
        self.assign_sub(variable, keras.ops.multiply(cubes, rate))


class Own(keras.optimizers.SGD):
    """A class of a user's own that is derived from one of Keras."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(keras.ops.square(gradient), variable, learning_rate)


def scaled(**arguments):
    """Adam inside of a loss scale that stays 1."""
    inner = keras.optimizers.Adam(**arguments)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)


def several(**arguments):
    """Adam and SGD."""
    chosen = keras.optimizers.Adam(**arguments), keras.optimizers.SGD(**arguments)
    return keras.optimizers.MultiOptimizer(lambda v: chosen["bias" in v.path])


WAYS = {
    name: (name, arguments)
    for name, arguments in OPTIMIZERS.items()
    if name in optimizer_names()
}
WAYS |= {
    f"{getattr(name, '__name__', name)} {arguments}": (name, arguments)
    for name, arguments in [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "clipnorm": 0.3}),
        ("SGD", {"clipvalue": 0.1}),
        ("Lion", {"global_clipnorm": 0.3}),
        ("Adam", {}),
        ("Adam", {"gradient_accumulation_steps": 2}),
        ("Adamax", {"ema_momentum": 0.5, "use_ema": True}),
        ("RMSprop", {}),
        (Cubes, {}),
        (Own, {}),
        (scaled, {}),
        *([(several, {})] if "MultiOptimizer" in optimizer_names() else []),
    ]
}


def make_optimizer(way):
    """A new optimizer of a way."""
    kind, arguments = WAYS[way]
    kind = getattr(keras.optimizers, kind) if isinstance(kind, str) else kind
    return kind(learning_rate=0.05, **arguments)


def slices_of(rank, step, dtype):
    """Another number of slices on each rank in each step: also none."""
    count = (rank + step) % 3 * 4
    generator = np.random.default_rng([rank, step])
    indices = np.minimum(generator.geometric(0.4, count) - 1, SHAPE[0] - 1)
    return generator.normal(size=(count, *SHAPE[1:])).astype(dtype), indices


def slices_of_all(step, dtype):
    """The mean over the ranks of the slices of a step, in rank order."""
    size = keras_dist.size()
    per_rank = [slices_of(rank, step, dtype) for rank in range(size)]
    values, indices = (np.concatenate(both) for both in zip(*per_rank, strict=True))
    return values / np.asarray(size, dtype), indices


def updates(optimizer, gradient_of, dtype, steps=4):
    """Update a table and a bias; returns all state."""
    generator = np.random.default_rng(5)
    table = keras.Variable(generator.normal(size=SHAPE).astype(dtype), dtype=dtype)
    bias = keras.Variable(np.ones(SHAPE, dtype), dtype=dtype, name="bias")
    optimizer.build([table, bias])
    for step in range(steps):
        values, indices = gradient_of(step)
        shape = tf.constant(SHAPE, tf.int64)
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)
        optimizer.apply([slices, tf.ones(SHAPE, dtype)], [table, bias])
    variables = [table, bias, *optimizer.variables]
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


# On three ranks one that is linear, one that converts slices, and one that scatters.
ON_THREE = {"SGD {}", "Adam {}", "RMSprop {}"}


@pytest.mark.several_ranks
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param(
            way, "float64", marks=pytest.mark.three_ranks if way in ON_THREE else []
        )
        for way in WAYS
    ]
    + [("Adam", "float32"), ("RMSprop {}", "float32")],
)
def test_an_optimizer_gets_the_slices_that_it_gets_on_one_process(world, way, dtype):
    """From ranks with different numbers of slices, also none; with the same bits."""

    def of_all(step):
        return slices_of_all(step, dtype)

    with models_in(dtype):
        expected = updates(make_optimizer(way), of_all, dtype)
        ours = updates(
            keras_dist.DistributedOptimizer(make_optimizer(way)),
            lambda step: slices_of(world.rank, step, dtype),
            dtype,
        )
    assert difference_of_states(ours, expected) <= TOLERANCES[dtype]
    assert len(set(keras_dist.gather(b"".join(map(np.ndarray.tobytes, ours))))) == 1


class Twice(keras.Model):
    """One table that is read for two inputs, and another one."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(11, 3)
        self.other = keras.layers.Embedding(11, 5)
        self.last = keras.layers.Dense(1)

    def call(self, x):
        own = [self.table(x[:, :1]), self.table(x[:, 2:]), self.other(x)]
        own = [keras.ops.sum(part, axis=1) for part in own]
        return self.last(keras.ops.concatenate(own, axis=1))


class WordsAndPositions(keras.Model):
    """Words, and their positions, which are read once for all rows of a batch."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(11, 3)
        self.positions = keras.layers.Embedding(6, 3)
        self.last = keras.layers.Dense(1)

    def call(self, x):
        own = self.words(x) + self.positions(keras.ops.arange(x.shape[1]))
        return self.last(keras.ops.sum(own, axis=1))


class Positions(keras.Model):
    """Words, their positions and distances, and rows of the table of words for all.

    The slices of the last three are sums over the rows of a batch.
    """

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(11, 3)
        self.positions = keras.layers.Embedding(6, 3)
        self.distances = keras.layers.Embedding(7, 3)
        self.last = keras.layers.Dense(1)

    def call(self, x):
        length = keras.ops.shape(x)[1]
        steps = keras.ops.arange(length)
        distances = self.distances(steps[:, None] - steps[None] + 3)
        own = self.words(x) + self.positions(steps) + self.words(steps)
        return self.last(keras.ops.sum(own[:, None] * distances, axis=(1, 2)))


@pytest.mark.parametrize(
    ("optimizer", "make", "arguments"),
    [
        pytest.param(
            *("RMSprop {}", Twice, {"steps_per_execution": 2}),
            marks=[pytest.mark.three_ranks, pytest.mark.slow_on_three],
        ),
        pytest.param(
            *("Adam {}", WordsAndPositions, {"run_eagerly": True}),
            marks=pytest.mark.several_ranks,
        ),
        pytest.param(
            *("Adam {}", Positions, {}),
            marks=[pytest.mark.three_ranks, pytest.mark.long],
        ),
        pytest.param(
            *("Adagrad", Positions, {"jit_compile": True}),
            marks=[pytest.mark.several_ranks, pytest.mark.long],
        ),
    ],
)
@pytest.mark.usefixtures("in_float64")
def test_a_way_to_train_equals_one_process(world, optimizer, make, arguments):
    """In a graph and with XLA; from tables read twice, or for all."""
    # A last batch that is not full; XLA would compile all once more for it.
    count = 8 * world.size if "jit_compile" in arguments else 22

    def compiled():
        return make_compiled(make, make_optimizer(optimizer), "mse", **arguments)

    assert_equals_one_process(compiled, words(count), 4, tolerance=1e-10)


@pytest.mark.several_ranks
def test_positions_of_batches_of_different_lengths_equal_one_process(world):
    """A batch of a rank is as long as its own longest row; words are of each row."""
    lengths = [3 + rank for rank in range(world.size)]
    batches = [words(2)[0][:1].repeat(2, axis=1)[:, :length] for length in lengths]
    start = np.random.default_rng(5).normal(size=(2, 11, 3))

    def tables():
        return [keras.Variable(own, dtype="float64") for own in start]

    def compute_loss(x):
        steps = keras.ops.arange(keras.ops.shape(x)[1])
        own = keras.ops.take(pair[0], x, axis=0) + keras.ops.take(pair[1], steps, 0)
        return keras.ops.sum(own**2)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def update(x):
        with tf.GradientTape() as tape:
            loss = compute_loss(x)
        handles = [table.value for table in pair]
        optimizer.apply(tape.gradient(loss, handles), pair)

    with models_in("float64"):
        pair = plain = tables()
        with tf.GradientTape(persistent=True) as tape:
            losses = [compute_loss(x) / world.size for x in batches]
        own = [tape.gradient(loss, [table.value for table in pair]) for loss in losses]
        joined = tf.IndexedSlices(
            tf.concat([gradient[0].values for gradient in own], 0),
            tf.concat([gradient[0].indices for gradient in own], 0),
            own[0][0].dense_shape,
        )
        summed = sum(tf.convert_to_tensor(gradient[1]) for gradient in own)
        keras.optimizers.Adam(0.1).apply([joined, summed], plain)
        pair = ours = tables()
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(0.1))
        optimizer.build(pair)
        update(batches[world.rank])
    assert_close(*([table.numpy() for table in each] for each in (ours, plain)), 1e-11)


LOOKUPS = {
    "words": (lambda x: x, "rows"),
    "the first word": (lambda x: x[:, 0], "rows"),
    "zeros for each row": (lambda x: tf.zeros(tf.shape(x)[:1], tf.int32), "rows"),
    "a number for each row": (lambda x: tf.fill([tf.shape(x)[0]], 3), "rows"),
    "words that occur": (lambda x: tf.unique(tf.reshape(x, [-1]))[0], "rows"),
    "positions": (lambda x: tf.range(tf.shape(x)[1]), "batch"),
    "positions to the longest": (lambda x: tf.range(tf.reduce_max(x)), "batch"),
    "distances": (lambda x: tf.constant([[0, 1], [1, 0]]), "batch"),
    "one row": (lambda x: tf.zeros([1], tf.int32), "batch"),
}


@pytest.mark.several_ranks
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_graph_shows_which_indices_are_of_rows(name):
    """Those whose number grows with the rows of the batch."""
    indices_of, kind = LOOKUPS[name]
    table = tf.Variable(np.ones(SHAPE, "float32"))
    lookups = Lookups()

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, indices_of(x)))
        lookups.mark(tape.gradient(loss, table), table)

    step.get_concrete_function()
    assert lookups.kind_of(table) == kind


@pytest.mark.several_ranks
def test_a_gather_of_constants_waits_until_its_graph_runs(world):
    """TensorFlow may compute constants while one rank traces, and others do not."""

    @tf.function
    def length():
        own = comm.gather_rows(tf.constant([2, 3]), name="keras_dist.test_constants")
        return tf.shape(tf.zeros(own))[0]

    if world.rank == 0:
        length.get_concrete_function()
    keras_dist.gather("traced")
    if world.rank > 0:
        length.get_concrete_function()
    assert int(length()) == 2


def test_a_loss_scale_sees_an_inf_of_any_slice(world):
    """Also if another slice of the same row is finite: no rank makes the update."""
    optimizer = keras_dist.DistributedOptimizer(scaled())
    table = keras.Variable(np.ones(SHAPE, "float32"))
    values = np.ones((4, 3), "float32")
    if world.rank == 0:
        values[0, 0] = np.inf
    if world.size == 1:
        values[:] = np.inf
    shape = tf.constant(SHAPE, tf.int64)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([2] * 4), shape)
    optimizer.apply([slices], [table])
    assert (table.numpy() == 1).all()
    assert float(optimizer.dynamic_scale) == 0.5


def on_ranks(optimizer, **options):
    """The state after updates with the slices of all ranks, by our optimizer."""
    rank, own = keras_dist.rank(), keras_dist.DistributedOptimizer(optimizer, **options)
    return updates(own, lambda step: slices_of(rank, step, "float64"), "float64")


def all_merged(step):
    """The mean over the ranks of a step's slices, each row once."""
    values, indices = slices_of_all(step, "float64")
    merged = sparse.merge(tf.IndexedSlices(values, indices))
    return merged.values, merged.indices


@pytest.mark.several_ranks
def test_ranks_on_gpus_merge_rows(world, monkeypatch):
    """Their operations add repeated rows in any order: the ranks would drift apart.

    So Adam gets each row once. A GPU on some ranks only is an error.
    """
    with models_in("float64"):
        repeated = on_ranks(make_optimizer("Adam {}"))
        monkeypatch.setattr(sparse, "is_merged", lambda _: True)
        expected = updates(make_optimizer("Adam {}"), all_merged, "float64")
        merged = on_ranks(make_optimizer("Adam {}"))
        monkeypatch.setattr(sparse, "is_merged", lambda _: world.rank == 1)
        with pytest.raises(ValueError, match="disagree on whether rows are merged"):
            on_ranks(make_optimizer("Adam {}"))
    assert difference_of_states(merged, expected) <= 1e-10
    assert difference_of_states(repeated, merged) > 1e-3


@pytest.mark.several_ranks
def test_a_rank_that_traces_again_alone_sends_what_the_others_send(world):
    """Also if something has set the clipping since the ranks compared gradients."""
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    table = keras.Variable(np.ones(SHAPE, "float32"))
    optimizer.build([table])

    @tf.function
    def step(indices):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, indices))
        optimizer.apply(tape.gradient(loss, [table.value]), [table])

    for length in (2, 2 + world.rank):  # of another shape on all ranks but the first
        step(tf.zeros([length], tf.int32))
        optimizer.clipnorm = 1e9
    assert len(set(keras_dist.gather(table.numpy().tobytes()))) == 1


@pytest.mark.several_ranks
def test_slices_beside_compressed_gradients_are_sent_as_they_are():
    """Two bytes a number would square their roundings, too."""
    with models_in("float32"):
        expected = on_ranks(make_optimizer("Adam {}"))
        ours = on_ranks(make_optimizer("Adam {}"), compression="bf16")
    assert difference_of_states(ours[:1], expected[:1]) <= 1e-5


@pytest.mark.several_ranks
def test_slices_are_added_up_before_a_variable_changes():
    """A scatter of a thousand slices has several threads, and no fixed order."""
    generator = np.random.default_rng(0)
    values = tf.constant(generator.normal(size=(3000, 4)), tf.float32)
    indices = tf.constant(generator.integers(0, 50, 3000))
    slices = tf.IndexedSlices(values, indices, tf.constant([50, 4], tf.int64))
    optimizer = keras.optimizers.RMSprop()
    table = keras.Variable(generator.normal(size=(50, 4)).astype("float32"))
    before, summed = table.numpy(), tf.convert_to_tensor(slices).numpy()
    with sparse.add_in_order(optimizer, [slices]):
        optimizer.assign_add(table, slices)
        assert (table.numpy() == before + summed).all()
        optimizer.assign_sub(table, slices)
        assert (table.numpy() == before + summed - summed).all()
    optimizer.assign_add(table, slices)
    assert (table.numpy() != before + summed).any()
