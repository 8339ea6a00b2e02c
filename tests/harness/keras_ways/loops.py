"""What scripts do around `fit`: callbacks, several fits, rates, optimizers."""

import keras
import numpy as np
import psutil
from keras import ops

from harness.data_kinds import Sequence
from harness.keras_ways.data import Guided, floats, integers, perceptron
from harness.keras_ways.way import ROWS, Registry

LOOPS = Registry("around fit")


class Centralized(keras.optimizers.RMSprop):
    """An optimizer of the user's: the mean of each gradient is subtracted."""

    def update_step(self, gradient, variable, learning_rate):
        if len(gradient.shape) > 1:
            axes = list(range(len(gradient.shape) - 1))
            gradient -= ops.mean(gradient, axis=axes, keepdims=True)
        super().update_step(gradient, variable, learning_rate)


class Signed(keras.optimizers.Optimizer):
    """An optimizer of the user's from the ground up, with a state and `apply`."""

    def __init__(self, learning_rate=0.01, **arguments):
        super().__init__(learning_rate=learning_rate, **arguments)

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads, trainable_variables=None):
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in grads))
        scaled = [gradient / (1 + norm) for gradient in grads]
        super().apply(scaled, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        slow = self.slow[self._get_variable_index(variable)]
        self.assign(slow, 0.9 * slow + gradient)
        self.assign_sub(variable, learning_rate * ops.tanh(slow))


@LOOPS.way(
    "accumulated gradients and a moving average of the weights",
    lambda: keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.8
    ),
)
@LOOPS.way(
    "an optimizer of the user's with a norm of all gradients", lambda: Signed(0.05)
)
@LOOPS.way(
    "gradient centralization: an optimizer of the user's",
    lambda: Centralized(0.01),
    is_traced=True,
)
def one_optimizer(run, make):
    model = run.compile(perceptron(4, 1, inputs=5), make(), "mse")
    return model, run.fit(model, floats(5), floats(1, seed=1), epochs=2)


class PerGlobalStep(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as one process with the global batch has to read it."""

    def __init__(self, inner, size):
        self.inner, self.size = inner, size

    def __call__(self, step):
        return self.inner(step * self.size) * self.size


def _schedule(run, schedule):
    if run.is_oracle and not run.is_global:
        schedule = PerGlobalStep(schedule, run.size)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    model = run.compile(perceptron(4, 1, inputs=5), optimizer, "mse")
    x, y = floats(5), floats(1, seed=1)
    return model, run.fit(model, x, y, epochs=2, lr_scaling="linear")


@LOOPS.way("schedules: cosine with warm-up, read at the scaled step")
def cosine(run):
    cosine = keras.optimizers.schedules.CosineDecay(
        0.0, 12, warmup_target=0.05, warmup_steps=6
    )
    return _schedule(run, cosine)


@LOOPS.way("schedules: steps of a rate, in a graph", is_traced=True)
def steps_of_rate(run):
    piecewise = keras.optimizers.schedules.PiecewiseConstantDecay
    return _schedule(run, piecewise([4, 8], [0.05, 0.02, 0.01]))


@LOOPS.way("rates set by callbacks")
def rates_by_callbacks(run):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = run.compile(perceptron(4, 1, inputs=5), optimizer, "mse")
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10.0),
    ]
    x, y = floats(5), floats(1, seed=1)
    given = {"callbacks": callbacks, "validation_data": (x[:9], y[:9])}
    return model, run.fit(model, x, y, epochs=4, **given)


@LOOPS.way("k-fold cross-validation in a loop", is_traced=True)
def folds(run):
    x, y = floats(5, rows=25), floats(1, rows=25, seed=1)
    scores, models, memory = [], [], []
    for fold in np.array_split(np.arange(25), 5):
        others = np.setdiff1d(np.arange(25), fold)
        model = perceptron(4, 1, inputs=5)
        run.compile(model, "adam", "mse", metrics=["mae"])
        history = run.fit(model, x[others], y[others])
        scores.append(model.evaluate(x[fold], y[fold], verbose=0))
        models.append([model, history])
        memory.append(psutil.Process().memory_info().rss)
    assert memory[-1] <= 1.1 * memory[0]
    return models, np.mean(scores, axis=0)


@LOOPS.way("a second and a third fit")
def several_fits(run):
    optimizer = keras.optimizers.Adam(0.01)
    model = run.compile(perceptron(4, 1, inputs=5), optimizer, "mse", metrics=["mae"])
    x, y = floats(5), floats(1, seed=1)
    first = run.fit(model, x, y)
    second = run.fit(model, x, y, epochs=3, initial_epoch=1)
    third = run.fit(model, run.batches(x[::-1], y), validation_data=(x[:9], y[:9]))
    return model, first, second, third


class Watching(keras.callbacks.Callback):
    """Predicts and evaluates at the end of each epoch."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.seen = x, y, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.predict(self.x, verbose=0))
        found = self.model.evaluate(self.x, self.y, verbose=0, return_dict=True)
        self.seen.append(found["loss"])
        logs["own"] = found["mae"]


@LOOPS.way("predict and evaluate in callbacks")
def watching(run):
    model = run.compile(perceptron(4, 1, inputs=5), "adam", "mse", metrics=["mae"])
    x, y = floats(5), floats(1, seed=1)
    watching = Watching(x[:9], y[:9])
    given = {"callbacks": [watching], "validation_data": (x[9:], y[9:])}
    history = run.fit(model, x, y, epochs=2, **given)
    return model, history, watching.seen


class Painting(keras.callbacks.Callback):
    """Writes pictures that the model makes, as the monitors of GANs do."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        latent = np.linspace(-1, 1, 10).reshape(2, 5)
        pictures = ops.convert_to_numpy(self.model(latent)).reshape(2, 4, 4, 1)
        for index, picture in enumerate(pictures):
            name = f"{keras.config.floatx()}_{index}_{epoch}.png"
            keras.utils.save_img(self.folder / name, picture)


@LOOPS.way("pictures written in on_epoch_end")
def painting(run):
    model = run.compile(perceptron(4, 16, inputs=5), "adam", "mse")
    given = {"epochs": 2, "callbacks": [Painting(run.folder)]}
    history = run.fit(model, floats(5), floats(16, seed=1), **given)
    names = [f"{i}_{e}" for e in range(2) for i in range(2)]
    paths = [run.folder / f"{keras.config.floatx()}_{name}.png" for name in names]
    pictures = [keras.utils.load_img(path, color_mode="grayscale") for path in paths]
    return model, history, list(map(keras.utils.img_to_array, pictures))


class Interrupting(keras.callbacks.Callback):
    """The user's Ctrl-C, in the second batch of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.params["steps"] + 2:
            raise KeyboardInterrupt


@LOOPS.way("KeyboardInterrupt in the middle, and another fit")
def interrupted(run):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model = run.compile(perceptron(4, 1, inputs=5), optimizer, "mse")
    x, y = floats(5), floats(1, seed=1)
    before = None
    try:
        run.fit(model, x, y, epochs=3, callbacks=[Interrupting()])
    except KeyboardInterrupt:
        before = [np.array(weight) for weight in model.get_weights()]
    assert before is not None
    return before, model, run.fit(model, x, y)


class OwnStep(Guided, keras.Model):
    """A functional model with that step."""


@LOOPS.way(
    "the guide's train step with sample weights and class weights", is_traced=True
)
def own_step(run):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, "tanh")(inputs)
    model = OwnStep(inputs, keras.layers.Dense(1, "sigmoid")(x))
    run.compile(model, "adam", "binary_crossentropy", metrics=["mae"])
    x, y = floats(5), integers(2)[:, None]
    weights = np.linspace(0.1, 2, ROWS).astype(keras.config.floatx())
    first = run.fit(model, x, y, sample_weight=weights, validation_data=(x, y))
    return model, first, run.fit(model, x, y, class_weight={0: 0.25, 1: 2.0})


class Likelihood(keras.layers.Layer):
    """An endpoint layer: it takes the targets, and adds its loss and a metric."""

    def __init__(self):
        super().__init__()
        self.accuracy = keras.metrics.BinaryAccuracy(name="acc")

    def call(self, targets, logits):
        losses = keras.losses.binary_crossentropy(targets, logits, from_logits=True)
        self.add_loss(ops.mean(losses))
        self.accuracy.update_state(targets, ops.sigmoid(logits))
        return ops.sigmoid(logits)


@LOOPS.way("an endpoint layer with add_loss of a mean and a metric", is_traced=True)
def endpoint(run):
    inputs, targets = (
        keras.Input((5,), name="inputs"),
        keras.Input((1,), name="targets"),
    )
    outputs = Likelihood()(targets, keras.layers.Dense(1)(inputs))
    model = run.compile(keras.Model([inputs, targets], outputs), "adam")
    y = integers(2)[:, None].astype(keras.config.floatx())
    return model, run.fit(model, {"inputs": floats(5), "targets": y})


class SumOfLosses(keras.Model):
    """`compute_loss` of the user's, which adds up the rows."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, **_):
        return ops.sum(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


@LOOPS.way("compute_loss of a sum and a mean", is_traced=True)
def sum_of_losses(run):
    inputs = keras.Input((5,))
    model = SumOfLosses(inputs, keras.layers.Dense(1)(inputs))
    run.compile(model, keras.optimizers.SGD(0.005, momentum=0.9))
    return model, run.fit(model, floats(5), floats(1, seed=1))


@LOOPS.way("batches of a PyDataset and of a generator")
def batches(run):
    model = run.compile(perceptron(4, 1, inputs=5), "adam", "mse")
    data = Sequence(floats(5), floats(1, seed=1), [run.batch_size])
    first = run.fit(model, data, validation_data=data)

    def generator():
        for index in range(len(data)):
            yield data[index]

    return model, first, run.fit(model, generator())


@LOOPS.way("several optimizers for the layers, several steps an execution")
def layered(run):
    body, head = keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.Adam(0.01)
    model = perceptron(4, 1, inputs=5)
    first = {weight.path for weight in model.layers[0].weights}
    optimizer = keras.optimizers.MultiOptimizer(
        lambda variable: body if variable.path in first else head
    )
    run.compile(model, optimizer, "mse", run_eagerly=False, steps_per_execution=2)
    history = run.fit(model, floats(5), floats(1, seed=1), epochs=2)
    return model.weights, body, head, history
