"""Tables, graphs, ratings and time series."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from harness.keras_ways.data import floats, integers, perceptron
from harness.keras_ways.way import ROWS, Registry
from harness.models import update

STRUCTURED = Registry("structured data")


def _table():
    """Columns of numbers, whole numbers and words, and a label."""
    columns = {
        "age": 40 + 10 * floats(1),
        "kind": integers(4, 1),
        "city": np.array(["rome", "oslo", "lima"])[integers(3, 1, seed=1)],
    }
    return columns, integers(2, seed=2)


@STRUCTURED.way("Normalization and StringLookup in the model")
def lookup_in_model(run):
    columns, y = _table()
    normalize = keras.layers.Normalization()
    normalize.adapt(columns["age"])
    lookup = keras.layers.StringLookup(output_mode="one_hot")
    lookup.adapt(columns["city"])
    numbers = keras.layers.IntegerLookup(output_mode="multi_hot")
    numbers.adapt(columns["kind"])
    inputs = {
        "age": keras.Input((1,), name="age"),
        "kind": keras.Input((1,), dtype="int32", name="kind"),
        "city": keras.Input((1,), dtype="string", name="city"),
    }
    found = [normalize(inputs["age"]), numbers(inputs["kind"]), lookup(inputs["city"])]
    found = [ops.cast(values, keras.config.floatx()) for values in found]
    x = keras.layers.Dense(4, "relu")(keras.layers.concatenate(found))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(x))
    run.compile(model, "adam", "binary_crossentropy", metrics=["accuracy"])
    return model, run.fit(model, run.batches(columns, y))


@STRUCTURED.way("Normalization and StringLookup in the pipeline", is_traced=True)
def lookup_in_pipeline(run):
    columns, y = _table()
    normalize = keras.layers.Normalization()
    normalize.adapt(columns["age"])
    lookup = keras.layers.StringLookup(output_mode="one_hot")
    lookup.adapt(columns["city"])

    def prepare(columns, y):
        city = tf.cast(lookup(columns["city"]), keras.config.floatx())
        return tf.concat([normalize(columns["age"]), city], axis=1), y

    model = perceptron(4, 1, inputs=5, activation="sigmoid")
    run.compile(model, "adam", "binary_crossentropy", metrics=["AUC"])
    data = run.batches(columns, y).map(prepare).prefetch(2)
    return model, run.fit(model, data, validation_data=data)


@STRUCTURED.way("FeatureSpace in the pipeline")
def feature_space(run):
    columns, y = _table()
    columns = {name: column[:, 0] for name, column in columns.items()}
    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_normalized(),
            "kind": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
            "city": keras.utils.FeatureSpace.string_categorical(num_oov_indices=0),
        },
        crosses=[keras.utils.FeatureSpace.cross(("kind", "city"), crossing_dim=5)],
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(columns))
    encoded = space.get_encoded_features()
    outputs = keras.layers.Dense(1, activation="sigmoid")(encoded)
    model = keras.Model(encoded, outputs)
    run.compile(model, "adam", "binary_crossentropy", metrics=["accuracy"])
    data = run.batches(columns, y).map(lambda x, y: (space(x), y))
    return model, run.fit(model, data)


@STRUCTURED.way("wide and deep: named inputs, some of them embedded")
def wide_and_deep(run):
    age, kind = keras.Input((2,), name="age"), keras.Input((1,), name="kind", dtype=int)
    embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(kind))
    deep = keras.layers.Dense(4, "relu")(keras.layers.concatenate([age, embedded]))
    wide = keras.layers.CategoryEncoding(4, "one_hot")(kind)
    wide = ops.cast(wide, keras.config.floatx())
    outputs = keras.layers.Dense(2)(keras.layers.concatenate([wide, deep]))
    model = keras.Model({"age": age, "kind": kind}, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.SGD(0.1), loss)
    x = {"age": floats(2), "kind": integers(4, 1)}
    return model, run.fit(model, x, integers(2), validation_split=0.09)


class Graph(keras.Model):
    """All nodes in each step; the batch says of which the labels count."""

    def __init__(self, nodes, edges):
        super().__init__()
        self.nodes, self.edges = nodes, edges
        self.project = keras.layers.Dense(4, use_bias=False)
        self.score = keras.layers.Dense(1, activation="tanh")
        self.outputs_of = keras.layers.Dense(3)

    def call(self, inputs):
        nodes, edges = inputs
        nodes = self.project(nodes)
        to, source = edges[:, 0], ops.take(nodes, edges[:, 1], axis=0)
        pairs = ops.concatenate([ops.take(nodes, to, axis=0), source], axis=1)
        scores = ops.exp(self.score(pairs))
        sums = ops.segment_sum(scores, to, num_segments=ROWS)
        attention = scores / (ops.take(sums, to, axis=0) + 1e-6)
        found = ops.segment_sum(source * attention, to, num_segments=ROWS)
        return self.outputs_of(ops.relu(found) + nodes)

    def _step(self, data):
        index, label = data
        scores = ops.take(self([self.nodes, self.edges]), index, axis=0)
        return label, scores, self.compute_loss(y=label, y_pred=scores)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            label, scores, loss = self._step(data)
        update(tape, loss, self.optimizer, self)
        return self.compute_metrics(None, label, scores, None)

    def test_step(self, data):
        label, scores, _ = self._step(data)
        return self.compute_metrics(None, label, scores, None)


@STRUCTURED.way("graph attention: the model is called with the whole graph")
def graph_attention(run):
    first = np.repeat(np.arange(ROWS), 3)
    edges = np.stack([first, (first * 5 + np.tile([1, 4, 9], ROWS)) % ROWS], axis=1)
    model = Graph(ops.convert_to_tensor(floats(5)), ops.convert_to_tensor(edges))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    run.compile(model, optimizer, loss, metrics=["accuracy"])
    index = np.arange(ROWS)[::-1].copy()
    label = integers(3)
    return model, run.fit(model, index, label, validation_data=(index[:9], label[:9]))


@STRUCTURED.way("graph convolution of padded graphs with their adjacency")
def graph_convolution(run):
    nodes, adjacency = keras.Input((4, 3)), keras.Input((4, 4))
    x = ops.relu(ops.matmul(adjacency, keras.layers.Dense(4)(nodes)))
    x = ops.matmul(adjacency, keras.layers.Dense(3)(x))
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model([nodes, adjacency], keras.layers.Dense(1, "sigmoid")(x))
    run.compile(model, "adam", "binary_crossentropy", metrics=["AUC"])
    links = integers(2, 4, 4).astype(keras.config.floatx())
    history = run.fit(
        model, [floats(4, 3), links], integers(2), class_weight={0: 2.0, 1: 0.5}
    )
    return model, history


class Recommender(keras.Model):
    """Products of embeddings of users and films, and a bias for each."""

    def __init__(self):
        super().__init__()
        decay = keras.regularizers.L2(1e-3)
        self.users = keras.layers.Embedding(7, 3, embeddings_regularizer=decay)
        self.films = keras.layers.Embedding(9, 3, embeddings_regularizer=decay)
        self.biases = [keras.layers.Embedding(count, 1) for count in (7, 9)]

    def call(self, inputs):
        user, film = inputs[:, 0], inputs[:, 1]
        score = ops.sum(self.users(user) * self.films(film), axis=1, keepdims=True)
        return ops.sigmoid(score + self.biases[0](user) + self.biases[1](film))


@STRUCTURED.way("collaborative filtering: embeddings of users and films")
def collaborative_filtering(run):
    model = Recommender()
    run.compile(model, keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy())
    x = np.stack([integers(7), integers(9, seed=1)], axis=1)
    y = 1 / (1 + np.exp(-floats()))
    return model, run.fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]))


@STRUCTURED.way("time series: windows of timeseries_dataset_from_array")
def time_series(run):
    def windows(count, seed):
        values = floats(2, rows=count + 4, seed=seed)
        return keras.utils.timeseries_dataset_from_array(
            values, values[4:, 0], sequence_length=5, batch_size=run.batch_size
        )

    model = keras.Sequential(
        [keras.Input((5, 2)), keras.layers.LSTM(3), keras.layers.Dense(1)]
    )
    run.compile(model, keras.optimizers.Adam(0.01), "mse")
    path = str(run.folder / f"{keras.config.floatx()}.weights.h5")
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=1),
        keras.callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_best_only=True
        ),
    ]
    given = {"validation_data": windows(9, 1), "callbacks": callbacks}
    history = run.fit(model, windows(ROWS, 0), epochs=2, **given)
    model.load_weights(path)
    return model, history


@STRUCTURED.way("imbalanced classes: class weights, counts of errors")
def imbalanced(run):
    model = perceptron(4, 1, inputs=5, activation="sigmoid")
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
    ]
    run.compile(model, "adam", "binary_crossentropy", metrics=metrics)
    x, y = floats(5), (np.arange(ROWS) % 7 == 0).astype("int32")[:, None]
    weights = {0: 1 / 16, 1: 1 / 4}
    given = {"class_weight": weights, "validation_data": (x[:9], y[:9])}
    return model, run.fit(model, x, y, epochs=2, **given)


@STRUCTURED.way("sample weights: of arrays, and of a data set")
def sample_weights(run):
    model = perceptron(4, 1, inputs=5)
    run.compile(model, "adam", "mse", weighted_metrics=["mae"])
    x, y = floats(5), floats(1, seed=1)
    weights = np.linspace(0.1, 2, ROWS).astype(keras.config.floatx())
    first = run.fit(model, x, y, sample_weight=weights)
    return model, first, run.fit(model, run.batches(x, y, weights))


@STRUCTURED.way("quantiles: a loss function with one value a row")
def quantiles(run):
    def pinball(y_true, y_pred):
        gaps = y_true - y_pred
        levels = ops.convert_to_tensor([0.1, 0.5, 0.9], dtype=y_pred.dtype)
        return ops.mean(ops.maximum(levels * gaps, (levels - 1) * gaps), axis=-1)

    model = perceptron(4, 3, inputs=5)
    run.compile(model, keras.optimizers.Adam(0.01), pinball, metrics=[pinball])
    return model, run.fit(model, floats(5), floats(1, seed=1))


@STRUCTURED.way("a distribution: the likelihood as a loss function")
def likelihood(run):
    def negative_log(y_true, y_pred):
        mean, spread = y_pred[:, :1], ops.softplus(y_pred[:, 1:]) + 0.1
        return ops.square((y_true - mean) / spread) / 2 + ops.log(spread)

    model = perceptron(4, 2, inputs=5)
    run.compile(model, keras.optimizers.RMSprop(0.01), negative_log)
    return model, run.fit(model, floats(5), floats(1, seed=1))
