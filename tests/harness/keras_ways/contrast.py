"""Models that learn by comparing outputs: teachers, pairs, triplets, views."""

import keras
import tensorflow as tf
from keras import ops

from harness.keras_ways.data import Guided, floats, integers, perceptron
from harness.keras_ways.way import Registry
from harness.models import update

CONTRAST = Registry("contrast")


class Distiller(keras.Model):
    """A student that learns from labels and from a teacher, by `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.teacher = perceptron(8, 3, inputs=4)
        self.student = perceptron(3, 3, inputs=4)
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, **_):
        cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        apart = keras.losses.KLDivergence()
        soft = ops.softmax(self.teacher(x, training=False) / 10, axis=1)
        loss = apart(soft, ops.softmax(y_pred / 10, axis=1)) * 10**2
        return 0.1 * cross(y, y_pred) + 0.9 * loss


@CONTRAST.way("knowledge distillation", is_traced=True)
def distillation(run):
    model = Distiller()
    optimizer = keras.optimizers.Adam(0.01)
    run.compile(model, optimizer, metrics=["sparse_categorical_accuracy"])
    x, y = floats(4), integers(3)
    return model, run.fit(model, x, y, epochs=2, validation_data=(x[:9], y[:9]))


class Views(keras.Model):
    """Two views of a row have to be nearer to one another than to a fixed bank.

    With the batch's other rows instead of the bank, each rank would see others than
    one process sees.
    """

    def __init__(self):
        super().__init__()
        self.encoder = perceptron(5, 4, inputs=4)
        self.head = perceptron(3, inputs=4)
        self.probe = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        self.bank = self.add_weight(shape=(3, 6), trainable=False, name="bank")

    def compile(self, contrast_optimizer, **arguments):
        super().compile(**arguments)
        self.contrast_optimizer = contrast_optimizer
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    def losses_of(self, one, two):
        one, two = (ops.normalize(self.head(self.encoder(v))) for v in (one, two))
        near = ops.sum(one * two, axis=1, keepdims=True)
        scores = ops.concatenate([near, ops.matmul(one, self.bank)], axis=1) / 0.5
        labels = ops.zeros((ops.shape(scores)[0],), dtype="int32")
        return keras.losses.sparse_categorical_crossentropy(
            labels, scores, from_logits=True
        )

    def train_step(self, data):
        unlabeled, (x, y) = data
        shape = ops.shape(unlabeled)
        views = [unlabeled + 0.1 * keras.random.normal(shape) for _ in range(2)]
        with tf.GradientTape() as tape:
            loss = ops.mean(self.losses_of(*views) + self.losses_of(*views[::-1]))
        update(tape, loss, self.contrast_optimizer, self.encoder, self.head)
        with tf.GradientTape() as tape:
            logits = self.probe(ops.stop_gradient(self.encoder(x)))
            probe_loss = self.loss(y, logits)
        update(tape, probe_loss, self.optimizer, self.probe)
        self.accuracy.update_state(y, logits)
        return {"c_loss": loss, "p_loss": probe_loss, "p_acc": self.accuracy.result()}

    @property
    def metrics(self):
        return [self.accuracy]


@CONTRAST.way("SimCLR: views against a bank, a linear probe, then fine-tuning")
def views(run):
    model = Views()
    model.bank.assign(floats(6, rows=3, seed=4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    contrast_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    run.compile(
        model, contrast_optimizer, optimizer=keras.optimizers.SGD(0.1), loss=loss
    )
    labeled = run.batches(floats(4, seed=1), integers(3))
    data = tf.data.Dataset.zip((run.batches(floats(4)), labeled))
    first = run.fit(model, data.prefetch(2))
    tuned = keras.Sequential([model.encoder, keras.layers.Dense(3)])
    run.compile(tuned, keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    second = run.fit(tuned, labeled, validation_data=labeled)
    return model, contrast_optimizer, tuned, first, second


class MomentumEncoder(keras.Model):
    """A target network follows the trained one, which predicts its outputs."""

    def __init__(self):
        super().__init__()
        self.online = perceptron(5, 3, inputs=4)
        self.target = keras.models.clone_model(self.online)
        self.target.set_weights(self.online.get_weights())
        self.predictor = perceptron(3, inputs=3)

    def train_step(self, x):
        one, two = (x + 0.1 * keras.random.normal(ops.shape(x)) for _ in range(2))
        with tf.GradientTape() as tape:
            found = ops.normalize(self.predictor(self.online(one)))
            wanted = ops.stop_gradient(ops.normalize(self.target(two)))
            loss = ops.mean(2 - 2 * ops.sum(found * wanted, axis=1))
        update(tape, loss, self.optimizer, self.online, self.predictor)
        pairs = zip(self.target.weights, self.online.weights, strict=True)
        for old, new in pairs:
            old.assign(0.8 * old + 0.2 * new)
        return {"loss": loss}


@CONTRAST.way("a momentum encoder that the trained one predicts", is_traced=True)
def momentum_encoder(run):
    model = run.compile(MomentumEncoder(), keras.optimizers.SGD(0.1, momentum=0.9))
    return model, run.fit(model, floats(4))


class Triplets(keras.Model):
    """An anchor, a positive and a negative in each row; `reduce` makes the loss."""

    def __init__(self, reduce):
        super().__init__()
        self.encoder = perceptron(5, 3, inputs=4)
        self.reduce = reduce
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, data):
        anchor, positive, negative = map(self.encoder, data)
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.loss_of(data)
            loss = self.reduce(losses)
        update(tape, loss, self.optimizer, self.encoder)
        self.tracker.update_state(losses)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.loss_of(data))
        return {"loss": self.tracker.result()}


@CONTRAST.way("siamese triplets, differentiated row by row", lambda losses: losses)
@CONTRAST.way("siamese triplets, the sum of the rows", ops.sum)
@CONTRAST.way("siamese triplets, the mean of the rows", ops.mean, is_traced=True)
def triplets(run, reduce):
    def batches(seed):
        parts = [floats(4, seed=seed + part) for part in range(3)]
        data = [tf.data.Dataset.from_tensor_slices(part) for part in parts]
        return tf.data.Dataset.zip(tuple(data)).batch(run.batch_size)

    model = run.compile(Triplets(reduce), keras.optimizers.SGD(0.002, momentum=0.9))
    return model, run.fit(model, batches(0), validation_data=batches(3))


@CONTRAST.way("siamese pairs, a loss function that adds up the rows", ops.sum)
@CONTRAST.way("siamese pairs, a loss function of one number", ops.mean)
def pairs(run, reduce):
    def contrastive(y_true, y_pred):
        near = ops.square(y_pred)
        far = ops.square(ops.maximum(1 - y_pred, 0))
        return reduce((1 - y_true) * near + y_true * far)

    one, two = keras.Input((4,)), keras.Input((4,))
    encoder = perceptron(5, 3, inputs=4)
    gap = keras.layers.Lambda(
        lambda pair: ops.sqrt(
            ops.sum(ops.square(pair[0] - pair[1]), axis=1, keepdims=True) + 1e-7
        )
    )([encoder(one), encoder(two)])
    outputs = keras.layers.Dense(1, activation="sigmoid")(gap)
    model = keras.Model([one, two], outputs)
    optimizer = keras.optimizers.RMSprop(0.01)
    run.compile(model, optimizer, contrastive, metrics=["accuracy"])
    y = integers(2).astype(keras.config.floatx())
    return model, run.fit(model, [floats(4), floats(4, seed=1)], y)


class Proxies(Guided, keras.Model):
    """Similarities of each row to one trained vector a class."""

    def __init__(self):
        super().__init__()
        self.encoder = perceptron(5, 3, inputs=4)
        self.proxies = self.add_weight(shape=(3, 4), name="proxies")

    def call(self, x):
        nearest = ops.normalize(self.proxies, axis=0)
        return ops.matmul(ops.normalize(self.encoder(x)), nearest) / 0.2


@CONTRAST.way("metric learning with a vector for each class")
def proxies(run):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01)
    model = run.compile(Proxies(), adam, loss, metrics=["accuracy"])
    return model, run.fit(model, floats(4), integers(4))
