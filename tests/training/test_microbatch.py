"""`microbatch` is the step on the whole batch, for less memory, or an error."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dist
from keras_dist.training.session import session_of

_ROWS = 37  # in batches of 16, the last of 5


@pytest.fixture(autouse=True)
def double_precision():
    """Rounding is no reason for a difference."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def rows():
    """Vectors and a label."""
    x = np.random.default_rng(0).normal(size=(_ROWS, 5))
    return x, (x.sum(axis=1) > 0).astype("float64")


def words():
    """Rows of words, some of them padding, and a value for each word."""
    generator = np.random.default_rng(1)
    x = generator.integers(1, 7, size=(_ROWS, 6))
    x[:, 4:] *= generator.random((_ROWS, 1)) > 0.5
    return x, generator.normal(size=(_ROWS, 6, 1))


def perceptron(loss="binary_crossentropy", optimizer="adam", **compiled):
    """A model with a regularizer, a frozen layer, and a sum in `add_loss`."""
    keras.utils.set_random_seed(1)
    frozen = layers.Dense(8, activation="tanh")
    frozen.trainable = False
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            frozen,
            SumLoss(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    compiled = {"jit_compile": False, "metrics": ["accuracy", "auc"]} | compiled
    model.compile(optimizer, loss, **compiled)
    return model


class SumLoss(layers.Layer):
    """A loss that is a mean over rows, and one that is a sum."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        self.add_loss(0.01 * keras.ops.sum(x))
        return x


class Positions(layers.Layer):
    """An embedding that is read once for all rows."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.table = layers.Embedding(6, 4)

    def build(self, shape):
        self.table.build(None)

    def call(self, x):
        return x + self.table(tf.range(tf.shape(x)[1]))


def tagger(loss="mse", **compiled):
    """A model with masks and two embeddings, whose repeated rows Adam must not add."""
    keras.utils.set_random_seed(1)
    x = keras.Input((6,), dtype="int32")
    y = layers.Embedding(7, 4, mask_zero=True)(x)
    y = layers.Dense(3, activation="tanh")(Positions()(y))
    model = keras.Model(x, layers.Dense(1)(y))
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
    compiled = {"jit_compile": False, "weighted_metrics": ["mae"]} | compiled
    model.compile(optimizer, loss, **compiled)
    return model


class OwnStep(keras.Model):
    """A user's step: sums and means in one loss, a metric, values in the logs."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.dense = layers.Dense(1, kernel_regularizer="l2")
        self.mean_loss = keras.metrics.Mean(name="mean_loss")
        self.compile(keras.optimizers.Adam(0.01), jit_compile=False)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = keras.ops.square(self(x, training=True)[:, 0] - y)
            loss = keras.ops.mean(errors) + 0.1 * keras.ops.sum(errors)
            loss += sum(self.losses)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        self.mean_loss.update_state(loss)
        return {
            "of_batch": loss,
            "sum": keras.ops.sum(errors),
            "mean_loss": self.mean_loss.result(),
        }


_WEIGHTS = np.linspace(0.1, 2, _ROWS)
_BY_WEIGHT = {"reduction": "mean_with_sample_weight"}
CASES = {
    "sums": lambda: (perceptron(keras.losses.MeanSquaredError("sum")), rows(), {}),
    "eager": lambda: (
        perceptron(run_eagerly=True),
        rows(),
        {"class_weight": {0: 0.3, 1: 2.0}},
    ),
    "masks": lambda: (tagger(), words(), {}),
    "own step": lambda: (OwnStep(), rows(), {}),
    "by weight": lambda: (
        tagger(keras.losses.MeanSquaredError(**_BY_WEIGHT)),
        words(),
        {"sample_weight": np.random.default_rng(2).random((_ROWS, 6))},
    ),
    "accumulation": lambda: (
        perceptron(
            optimizer=keras.optimizers.AdamW(gradient_accumulation_steps=2),
            steps_per_execution=2,
        ),
        rows(),
        {"sample_weight": _WEIGHTS},
    ),
    "XLA": lambda: (tagger(jit_compile=True), words(), {}),
}
_QUICK = ("eager", "masks", "own step")


@pytest.mark.parametrize(
    "name",
    [n if n in _QUICK else pytest.param(n, marks=pytest.mark.long) for n in CASES],
)
def test_pieces_are_the_whole_batch(name):
    """Weights, optimizer state, metrics and logs are those of plain Keras."""
    results = []
    for fit, options in (
        (keras.Model.fit, {}),
        (keras_dist.dist_fit, {"microbatch": 6}),
    ):
        model, (x, y), arguments = CASES[name]()
        logs = LogsOfBatches()
        arguments = arguments | {"callbacks": [logs], "shuffle": False, "verbose": 0}
        history = fit(model, x, y, batch_size=16, epochs=2, **arguments, **options)
        history.history.pop("rows_per_second", None)
        state = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
        results.append((state, history.history, logs.seen))
    (state, history, seen), (own_state, own_history, own_seen) = results
    for own, expected in zip(own_state, state, strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-10)
    assert own_history.keys() == history.keys()
    for key, expected in history.items():
        assert own_history[key] == pytest.approx(expected, abs=1e-10), key
    for own, expected in zip(own_seen, seen, strict=True):
        assert own == pytest.approx(expected, abs=1e-10)


class LogsOfBatches(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({k: v for k, v in logs.items() if k != "rows_per_second"})


class Step(keras.Model):
    """A user's step of one kind: most make more than one update at their end."""

    def __init__(self, kind, **compiled):
        super().__init__()
        self.kind = kind
        self.dense, self.target = layers.Dense(1), layers.Dense(1, name="target")
        self.target.trainable = False
        self.other = keras.optimizers.SGD()
        self.counter = self.add_weight(
            (), "zeros", "int32", trainable=False, name="counter"
        )
        self.built = True
        self.dense.build((None, 5))
        self.target.build((None, 5))
        self.compile(keras.optimizers.SGD(), jit_compile=False, **compiled)

    def call(self, x):
        if self.kind == "counts its calls in counter":
            self.counter.assign_add(1)
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        if self.kind == "itself changes counter":
            self.counter.assign_add(1)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True)[:, 0] - y) ** 2)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        if self.kind == "no updates":
            weights[0].assign_sub(gradients[0])
        elif self.kind == "inside a function, a condition or a loop":
            tf.cond(loss > 0, lambda: self._update(gradients, weights), lambda: 0)
        else:
            self._update(gradients, weights)
        if self.kind == "2 updates":
            self.other.apply(gradients, weights)
        if self.kind == "that changes dense":
            weights[0].assign_add(0 * weights[0])
        if self.kind == "itself changes target":
            self.target.kernel.assign(self.dense.kernel)
        if self.kind == "reads dense":
            return {"norm": keras.ops.norm(self.dense.kernel)}
        if self.kind == "reads iteration":
            return {"step": self.optimizer.iterations + 1}
        return {"of_batch": loss}

    def _update(self, gradients, weights):
        self.optimizer.apply(gradients, weights)
        return 0


REFUSED = [
    "2 updates",
    "no updates",
    "inside a function, a condition or a loop",
    "that changes dense",
    "itself changes counter",
    "itself changes target",
    "counts its calls in counter",
    "reads dense",
    "reads iteration",
]


def test_a_step_that_cannot_be_divided_is_an_error_before_the_first_update():
    """It says what the step does; a step that can be divided trains."""
    x, y = rows()
    for kind, is_eager in [(kind, False) for kind in REFUSED] + [("2 updates", True)]:
        model = Step(kind, run_eagerly=is_eager)
        before = [weight.numpy() for weight in model.trainable_weights]
        with pytest.raises(ValueError, match="`microbatch` needs a train step") as told:
            keras_dist.dist_fit(model, x, y, batch_size=16, microbatch=6, verbose=0)
        words = kind.replace("reads iteration", "reads ").split()
        assert all(word in str(told.value) for word in words), told.value
        for weight, expected in zip(model.trainable_weights, before, strict=True):
            np.testing.assert_array_equal(weight.numpy(), expected)
        assert int(model.optimizer.iterations) == 0
    model = Step("one update")
    keras_dist.dist_fit(model, x, y, batch_size=16, microbatch=6, verbose=0)
    assert int(model.optimizer.iterations) == 3


def test_a_loss_that_is_no_mean_and_no_sum_is_an_error():
    """Dice is one number for all rows: those of pieces do not add up to it."""
    model = perceptron(keras.losses.Dice())
    x, y = rows()
    with pytest.raises(ValueError, match="means or sums over rows"):
        keras_dist.dist_fit(model, x, y[:, None], microbatch=6, verbose=0)


def test_what_cannot_be_cut_is_an_error():
    """A bad number, statistics of all rows, and an array of another length."""
    x, y = rows()
    for bad in (0, -1, 1.5, "64", True):
        with pytest.raises(ValueError, match=r"at least 1.*microbatch="):
            keras_dist.dist_fit(perceptron(), x, y, microbatch=bad, verbose=0)
    model = keras.Sequential(
        [layers.BatchNormalization(synchronized=True), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="synchronized=True"):
        keras_dist.dist_fit(model, x, y, microbatch=6, verbose=0)
    constant = tf.data.Dataset.from_tensors(((x, np.ones((3, 2))), y))
    inputs = keras.Input((5,)), keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1)(inputs[0]))
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"an array of shape \(3, 2\)"):
        keras_dist.dist_fit(model, constant, microbatch=6, verbose=0)


def test_statistics_and_random_numbers_are_those_of_pieces():
    """Batch normalization moves once for each piece; dropout draws anew for each."""
    x, y = rows()
    model = keras.Sequential(
        [layers.BatchNormalization(momentum=0.0), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    keras_dist.dist_fit(
        model, x[:16], y[:16], batch_size=16, microbatch=8, shuffle=False, verbose=0
    )
    mean = model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(mean, x[8:16].mean(axis=0))


def test_the_plan_says_so_and_the_model_is_plain_again(capsys):
    """The next fit computes its batches at once."""
    x, y = rows()
    model = perceptron()
    many = keras_dist.DistributedModel(model, microbatch=6)
    many.fit(x, y, batch_size=16)
    assert "16 rows, in pieces of 6 rows" in capsys.readouterr().out
    assert session_of(model).microbatch.rows == 6
    assert type(model.optimizer) is keras.optimizers.Adam
    assert type(model) is keras.Sequential


_PEAKS = textwrap.dedent(
    """
    import keras, numpy as np, keras_dist
    from keras import layers

    def peak(rows, **options):
        x, y = np.ones((rows, 64, 64, 1), "float32"), np.ones(rows, "float32")
        convolutions = [
            layers.Conv2D(8, 1, activation="tanh") for _ in range(6)
        ]
        model = keras.Sequential(
            [*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=False)
        keras_dist.dist_fit(model, x, y, batch_size=rows, verbose=0, **options)
        # Not `ru_maxrss`, which begins with that of the process that has forked.
        [line] = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
        return int(line.split()[1])

    print(peak(8), peak(512, microbatch=64), peak(512))
    """
)


def test_eight_pieces_need_a_third_of_the_memory():
    """The peak of the process grows by a third of what the undivided step needs."""
    # Buffers of 64 KB and more go back to the system: the peak is that of buffers in
    # use, and not of the heap's gaps. With one thread it is always the same.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS], env=environment, capture_output=True, text=True
    )
    start, in_pieces, at_once = map(int, done.stdout.split())
    assert at_once - start > 300_000  # KB: what is measured is the activations
    assert in_pieces - start < 0.35 * (at_once - start)


class Hungry(layers.Layer):
    """Runs out of memory where a batch has more than `limit` rows."""

    def __init__(self, limit, *, is_stateful=False):
        super().__init__()
        self.limit, self.is_stateful = limit, is_stateful
        self.supports_masking = True

    def call(self, x):
        def needed(rows):
            if rows > self.limit:
                raise MemoryError  # TensorFlow makes a ResourceExhaustedError of it
            return np.int32(0)

        found = tf.numpy_function(
            needed, [tf.shape(x)[0]], tf.int32, stateful=self.is_stateful
        )
        return x + tf.cast(tf.ensure_shape(found, []), x.dtype)


def hungry_tagger(limit, **compiled):
    """A model with masks, and random numbers where it fits as a whole."""
    keras.utils.set_random_seed(1)
    noise = [layers.Dropout(0.3), layers.BatchNormalization()] if limit is None else []
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(7, 4, mask_zero=True),
            layers.Dense(3, activation="tanh"),
            *noise,
            Hungry(limit or _ROWS),
            layers.Dense(1),
        ]
    )
    compiled = {"jit_compile": False, "weighted_metrics": ["mae"]} | compiled
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "mse", **compiled)
    return model


@pytest.mark.parametrize(
    ("limit", "steps", "rows_of_piece"), [(None, 2, None), (5, 1, 4), (5, 2, 4)]
)
def test_auto_takes_a_step_that_runs_out_of_memory_again(
    limit, steps, rows_of_piece, capsys
):
    """From the same state, in pieces; if none does, all is as without it."""
    x, y = words()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    arguments = {"epochs": 3, "verbose": 0}
    oracle = hungry_tagger(None if limit is None else _ROWS, steps_per_execution=steps)
    expected = oracle.fit(data, **arguments)
    model = hungry_tagger(limit, steps_per_execution=steps)
    found = keras_dist.dist_fit(model, data, microbatch="auto", **arguments)
    state, own_state = (
        [v.numpy() for v in [*m.variables, *m.optimizer.variables]]
        for m in (oracle, model)
    )
    for own, value in zip(own_state, state, strict=True):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10)
    for key, values in expected.history.items():
        assert found.history[key] == pytest.approx(values, abs=1e-10), key
    rows = session_of(model).microbatch.rows
    assert (rows if rows is None else int(rows)) == rows_of_piece
    assert capsys.readouterr().out.count("ran out of memory on rank 0") == bool(limit)


def test_auto_ends_where_one_row_is_too_much():
    """And leaves the model as it was; other errors are not those of memory."""
    x, y = words()
    model = hungry_tagger(0.5)
    before = model.get_weights()
    with pytest.raises(MemoryError, match="even in pieces of one row"):
        keras_dist.dist_fit(model, x, y, microbatch="auto", verbose=0)
    for own, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, expected)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(tf.errors.InvalidArgumentError):
        keras_dist.dist_fit(tagger(), x + 100, y, microbatch="auto", verbose=0)


def test_auto_refuses_what_cannot_be_taken_back():
    """A function of Python in the step, and steps without a graph."""
    x, y = words()
    model = tagger()
    model.compile("sgd", lambda t, p: Hungry(9, is_stateful=True)((t - p) ** 2))
    with pytest.raises(ValueError, match=r"auto.* cannot be taken back \(PyFunc\)"):
        keras_dist.dist_fit(model, x, y, microbatch="auto", verbose=0)
    with pytest.raises(ValueError, match="run_eagerly=True"):
        keras_dist.dist_fit(
            tagger(run_eagerly=True), x, y, microbatch="auto", verbose=0
        )
