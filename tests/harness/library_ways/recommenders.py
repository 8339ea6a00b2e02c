"""KerasRS: retrieval and ranking, from arrays and from data sets."""

import keras
import keras_rs
from keras import ops

from harness.keras_ways.data import floats, integers
from harness.keras_ways.way import Registry

RECOMMENDERS = Registry("KerasRS", is_traced=True)

_USERS, _ITEMS, _WIDTH = 20, 30, 4


def interactions():
    """A user, an item and a rating in each row."""
    x = {"user": integers(_USERS), "item": integers(_ITEMS, seed=1)}
    return x, floats(1, seed=2)


class TwoTowers(keras.Model):
    """Scores all items for each user; the item of the row is the right one."""

    def __init__(self):
        super().__init__()
        self.users = keras.layers.Embedding(_USERS, _WIDTH)
        self.items = keras.layers.Embedding(_ITEMS, _WIDTH)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=5, return_scores=False)
        self.loss_of_items = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )

    def build(self, input_shape):
        self.users.build(input_shape)
        self.items.build(input_shape)
        self.retrieval.candidate_embeddings = self.items.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, users, training=False):
        embedded = self.users(users)
        result = {"embedding": embedded}
        if not training:
            result["items"] = self.retrieval(embedded)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight=None, **_):
        every_item = self.items(ops.arange(_ITEMS))
        scores = ops.matmul(y_pred["embedding"], ops.transpose(every_item))
        return self.loss_of_items(y, scores, sample_weight)


@RECOMMENDERS.way("retrieval by two towers, from a data set", True)
@RECOMMENDERS.way("retrieval by two towers", False, on_three=True)
def retrieval(run, is_dataset):
    keras.utils.set_random_seed(1)
    model = run.compile(TwoTowers(), keras.optimizers.Adagrad(0.1))
    x, _ = interactions()
    given, some = (x["user"], x["item"]), (x["user"][:9], x["item"][:9])
    users = some[0]
    if is_dataset:
        users = some = run.batches(*given)
        given = (some,)
    history = run.fit(model, *given, epochs=2, validation_data=some)
    return model, history, model.predict(users, verbose=0)["items"]


def ranking(interaction):
    """A model of ratings, with the features of a user and an item combined."""
    inputs = {
        name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")
    }
    embedded = [
        keras.layers.Embedding(_USERS, _WIDTH)(inputs["user"]),
        keras.layers.Embedding(_ITEMS, _WIDTH)(inputs["item"]),
    ]
    if interaction == "cross":
        x = keras.layers.Concatenate()(embedded)
        combined = keras_rs.layers.FeatureCross(projection_dim=2)(x, x)
        combined = keras_rs.layers.FeatureCross()(x, combined)
    else:
        combined = keras_rs.layers.DotInteraction()(embedded)
    return keras.Model(inputs, keras.layers.Dense(1)(combined))


def train_ratings(run, model):
    """Two epochs from arrays, with a validation."""
    run.compile(model, keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = interactions()
    some = {name: array[:9] for name, array in x.items()}
    return model, run.fit(model, x, y, epochs=2, validation_data=(some, y[:9]))


@RECOMMENDERS.way("ranking by FeatureCross", on_three=True)
def feature_cross(run):
    return train_ratings(run, ranking("cross"))


@RECOMMENDERS.way("ranking by DotInteraction, from a data set", on_three=True)
def dot_interaction(run):
    model = ranking("dot")
    run.compile(model, keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    data = run.batches(*interactions())
    return model, run.fit(model, data, epochs=2, validation_data=data)


@RECOMMENDERS.way("ranking by a listwise loss", on_three=True)
def listwise(run):
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.Dense(1, use_bias=False),  # a loss of differences
            keras.layers.Flatten(),
        ]
    )
    adam, metrics = keras.optimizers.Adam(0.01), [keras_rs.metrics.NDCG(k=3)]
    run.compile(model, adam, keras_rs.losses.ListMLELoss(), metrics=metrics)
    y = integers(3, 6, seed=3).astype(keras.config.floatx())
    return model, run.fit(model, floats(6, 3), y, epochs=2)


def distributed_embedding():
    """Two tables, one of them for a feature of several items."""
    layers, features, inputs = keras_rs.layers, {}, {}
    for name, rows, count in (("user", _USERS, 1), ("bought", _ITEMS, 3)):
        table = layers.TableConfig(f"{name}_table", rows, _WIDTH, combiner="mean")
        shapes = (None, count), (None, _WIDTH)
        features[name] = layers.FeatureConfig(name, table, *shapes)
        inputs[name] = keras.Input((count,), dtype="int32", name=name)
    embedded = layers.DistributedEmbedding(features)(inputs)
    combined = keras.layers.Concatenate()([embedded["user"], embedded["bought"]])
    return keras.Model(inputs, keras.layers.Dense(1)(combined))


def purchases():
    """A user, three items and a rating in each row."""
    x = {"user": integers(_USERS, 1), "bought": integers(_ITEMS, 3, seed=1)}
    return x, floats(1, seed=2)


@RECOMMENDERS.way("DistributedEmbedding, from a data set", True, on_three=True)
@RECOMMENDERS.way("DistributedEmbedding", False, on_three=True)
def embedding(run, is_dataset):
    model = distributed_embedding()
    run.compile(model, keras.optimizers.Adagrad(0.1), "mse")
    data = purchases()
    if is_dataset:
        data = (run.batches(*data),)
    return model, run.fit(model, *data, epochs=2)
