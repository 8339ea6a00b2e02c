"""Models put together from parts: loss × where it stands × data × step × optimizer.

Each is a function of its seed alone, and compared with plain Keras on one process, in
float64.
"""

import dataclasses
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from claims import difference_of_states, models_in
from data_kinds import KINDS, ids_of_batches
from keras import ops
from models import vectors

import keras_dist

RATE = 0.003
EPOCHS = 2

# A value for each row, of targets and predictions of shape `(rows, 1)`.
VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "squares": lambda y, p: ops.mean(ops.square(y - p), axis=-1),
    "absolute": lambda y, p: ops.sum(ops.abs(y - p), axis=-1),
    "logarithms": lambda y, p: ops.log(1 + ops.square(y - 2 * p))[:, 0],
    "crossentropy": lambda y, p: keras.losses.binary_crossentropy(
        y, p, from_logits=True
    ),
}

# What is made of them.
ENDS: dict[str, Callable[[Any], Any]] = {
    "mean": ops.mean,
    "sum": ops.sum,
    "half of the sum": lambda values: ops.sum(values) / 2,
    "sum over rows": lambda values: (
        ops.sum(values) / ops.cast(ops.shape(values)[0], values.dtype)
    ),
    "vector": lambda values: values,
    "mean and sum": lambda values: ops.mean(values) + 0.1 * ops.sum(values),
}

REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"]

# Where the loss stands, for each kind of train step.
WHERE = {
    "Keras's": ["Loss of Keras", "function", "add_loss", "compute_loss"],
    "compute_loss called": ["Loss of Keras", "function", "add_loss", "compute_loss"],
    "own tape": ["Loss of Keras", "train_step", "add_loss"],
}

# Who keeps the optimizers of a train step of one's own.
HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda one, two: one,
    "list": lambda one, two: [one, two],
    "dict": lambda one, two: {"first": one, "second": two},
    "object": lambda one, two: types.SimpleNamespace(first=one, rest=[two]),
}

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "Adam": lambda rate: keras.optimizers.Adam(rate, global_clipnorm=1.0),
    "RMSprop": lambda rate: keras.optimizers.RMSprop(rate, weight_decay=0.01),
    "Adagrad": lambda rate: keras.optimizers.Adagrad(rate, clipvalue=0.5),
}

MODES: dict[str, dict[str, Any]] = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "graph of two": {"steps_per_execution": 2},
}

# One of each way in which batches are divided.
DATA = [
    "arrays",
    "arrays on disk",
    "batched",
    "batches cached",
    "concatenated",
    "filtered batches",
    "generator",
    "loader",
    "sequence",
]
UNKNOWN_LENGTH = {"filtered batches", "generator"}


@dataclass(frozen=True)
class Parts:
    """One model, its data and its optimizers.

    Args:
        number: The seed that it was drawn from.
        values: Name in `VALUES`.
        end: Name in `ENDS`, or a reduction for a loss of Keras.
        where: One of `WHERE`.
        step: Kind of the train step, a key of `WHERE`.
        data: Name in `DATA`.
        holder: `"compile"`, or a name in `HOLDERS`.
        optimizer: Name in `OPTIMIZERS`.
        mode: Name in `MODES`.
        rows: How many rows there are.
        batch_size: Of one rank.
        is_regularized: Whether there is a loss of the weights, too.
        is_built: Whether the model is built before the fit.
        is_global: Whether the ranks share the batches, by `batch="global"`.
    """

    number: int
    values: str
    end: str
    where: str
    step: str
    data: str
    holder: str
    optimizer: str
    mode: str
    rows: int
    batch_size: int
    is_regularized: bool
    is_built: bool
    is_global: bool = False

    part = "fuzz"
    tolerance = 1e-9

    @property
    def name(self) -> str:
        """All parts in words."""
        added = ["regularized"] * self.is_regularized + ["built"] * self.is_built
        added += ["global"] * self.is_global
        return (
            f"{self.number}: {self.values}, {self.end}, in {self.where}, step: "
            f"{self.step}, {self.data}, {self.optimizer} in {self.holder}, "
            f"{self.mode}, {self.rows} rows by {self.batch_size} {' '.join(added)}"
        )

    def measure(self, size: int, expected: Any) -> tuple[float, float, Any]:
        """Largest relative difference, the tolerance, and our model: as of `Case`."""
        with models_in("float64"):
            model = self._compiled(RATE)
            data = KINDS[self.data](*self._arrays(), self.batch_size)
            x, y = data if self.data.startswith("arrays") else (data, None)
            history = keras_dist.dist_fit(
                model,
                x,
                y,
                batch_size=self.batch_size if y is not None else None,
                epochs=self._epochs,
                shuffle=False,
                verbose=0,
                batch="global" if self.is_global else "rank",
            )
        own = state_of(model, history)
        return difference_of_states(own, expected), self.tolerance, model

    def state_of_one_process(self, size: int) -> Any:
        """The state that plain Keras ends with, of global batches."""
        with models_in("float64"):
            model = self._compiled(RATE * (1 if self.is_global else size))
            history = model.fit(
                self._global_batches(size),
                epochs=self._epochs,
                shuffle=False,
                verbose=0,
            )
        return state_of(model, history)

    def _global_batches(self, size: int) -> Any:
        """The batches of all ranks, joined step by step."""
        x, y = self._arrays()
        ids, size = np.arange(self.rows), 1 if self.is_global else size
        of_ranks = [ids[i : i + self.batch_size] for i in ids[:: self.batch_size]]
        if not self.data.startswith("arrays"):
            of_ranks = ids_of_batches(KINDS[self.data](ids, ids, self.batch_size))
        steps = [
            np.concatenate(of_ranks[i : i + size])
            for i in range(0, len(of_ranks), size)
        ]
        steps = [step for step in steps if len(step) >= size]
        batches = tf.data.Dataset.from_generator(
            lambda: ((x[step], y[step]) for step in steps),
            output_signature=(
                tf.TensorSpec([None, *x.shape[1:]], x.dtype),
                tf.TensorSpec([None, *y.shape[1:]], y.dtype),
            ),
        )
        # In a graph, Keras counts an update too many at the end of data of unknown
        # length: so must the oracle.
        is_known = self.data not in UNKNOWN_LENGTH
        count = tf.data.experimental.assert_cardinality(len(steps))
        return batches.apply(count) if is_known else batches

    @property
    def _epochs(self) -> int:
        return 1 if self.data == "generator" else EPOCHS

    def _arrays(self) -> tuple[Any, Any]:
        x, y = vectors(self.rows)
        return x.astype("float64"), y.astype("float64")[:, None]

    def _compiled(self, rate: float) -> Any:
        keras.utils.set_random_seed(3)
        model = class_of(self)(self)
        loss: Any = None
        if self.where == "Loss of Keras":
            loss = keras.losses.MeanSquaredError(reduction=self.end)
        elif self.where == "function":
            loss = self.loss
        elif self.where == "add_loss":
            loss = [None, "mse"][self.number % 2]
        make = OPTIMIZERS[self.optimizer]
        if self.holder == "compile":
            model.compile(make(rate), loss, **MODES[self.mode])
        else:
            model.compile(loss=loss, **MODES[self.mode])
            model.held = HOLDERS[self.holder](make(rate), make(rate / 2))
        if self.is_built:
            model.build((None, 5))
        return model

    def loss(self, y: Any, p: Any) -> Any:
        """The loss of a batch: one number, or one for each row."""
        return ENDS[self.end](VALUES[self.values](y, p))


class Drawn(keras.Model):
    """Two layers; `add_loss`, if the loss stands there."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        regularizer = keras.regularizers.L2(0.01) if parts.is_regularized else None
        self.hidden = keras.layers.Dense(
            4, activation="tanh", kernel_regularizer=regularizer
        )
        self.last = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.last.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        y_pred = self.last(self.hidden(x))
        if self.parts.where == "add_loss":
            self.add_loss(0.1 * self.parts.loss(x[:, :1], y_pred))
        return y_pred


class ComputesLoss(keras.Model):
    """A `compute_loss` of its own."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.parts.loss(y, y_pred) + sum(self.losses)


class OwnStep(keras.Model):
    """A `train_step` of its own, with optimizers kept anywhere."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.own_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.parts.holder == "compile":
            self.optimizer.apply(gradients, variables)
        elif self.parts.holder == "attribute":
            self.held.apply(gradients, variables)
        else:
            first, second = self.both()
            first.apply(gradients[:2], variables[:2])
            second.apply_gradients(zip(gradients[2:], variables[2:], strict=True))
        is_number = len(loss.shape) == 0
        return {"loss": loss if is_number else ops.ones(())}

    def both(self) -> Any:
        """The optimizers, wherever they are."""
        if isinstance(self.held, types.SimpleNamespace):
            return self.held.first, self.held.rest[0]
        is_dict = isinstance(self.held, dict)
        return list(self.held.values()) if is_dict else self.held

    def own_loss(self, x: Any, y: Any, p: Any) -> Any:
        """What is differentiated."""
        return self.compute_loss(x=x, y=y, y_pred=p, training=True)


class OwnTape(OwnStep):
    """It adds up its losses by itself, too."""

    def own_loss(self, x: Any, y: Any, p: Any) -> Any:
        if self.parts.where == "add_loss":
            return ops.mean(ops.square(y - p)) + sum(map(ops.sum, self.losses))
        if self.parts.where == "Loss of Keras":
            reduction = self.parts.end
            loss = keras.losses.BinaryCrossentropy(True, reduction=reduction)(y, p)
        else:
            loss = self.parts.loss(y, p)
        # A vector is summed when it is differentiated.
        return loss + sum(self.losses) if len(loss.shape) == 0 else loss


def class_of(parts: Parts) -> type:
    """The class of a model: only the methods that its parts need are its own."""
    bases: list[type] = []
    if parts.step != "Keras's":
        bases.append(OwnTape if parts.step == "own tape" else OwnStep)
    if parts.where == "compute_loss":
        bases.append(ComputesLoss)
    return type("Drawn", (*bases, Drawn), {}) if bases else Drawn


def state_of(model: Any, history: Any) -> list[Any]:
    """Weights, the state of all optimizers, and the losses that were logged."""
    kept = [model.optimizer]
    if model.parts.holder == "attribute":
        kept = [model.held]
    elif model.parts.holder != "compile":
        kept = list(model.both())
    variables = [*model.weights]
    for optimizer in kept:
        rate = optimizer.learning_rate
        variables += [v for v in optimizer.variables if v is not rate]
    logged = [np.asarray(history.history.get("loss", [0.0]), np.float64)]
    return [keras.ops.convert_to_numpy(v) for v in variables] + logged


def draw(number: int) -> tuple[int, Parts]:
    """How many ranks, and one of all combinations that Keras can train."""
    draws = random.Random(number)
    size = draws.choice([2, 3])
    step = draws.choice(sorted(WHERE))
    where = draws.choice(WHERE[step])
    holders = ["compile", *HOLDERS] if step != "Keras's" else ["compile"]
    ends = REDUCTIONS if where == "Loss of Keras" else list(ENDS)
    drawn = Parts(
        number,
        values=draws.choice(sorted(VALUES)),
        end=draws.choice(ends),
        where=where,
        step=step,
        data=draws.choice(DATA),
        holder=draws.choice(holders),
        optimizer=draws.choice(sorted(OPTIMIZERS)),
        mode=draws.choice(["eager", "graph", "graph", "graph of two"]),
        rows=draws.randint(6, 30),
        batch_size=draws.randint(2, 7),
        is_regularized=draws.random() < 0.3,
        is_built=draws.random() < 0.5,
    )
    if draws.random() < 0.4:
        batch_size = max(drawn.batch_size, 3)  # a row for each rank
        drawn = dataclasses.replace(drawn, is_global=True, batch_size=batch_size)
    is_warned = drawn.mode == "eager" and _adds_sum_to_other(drawn)
    return size, dataclasses.replace(drawn, mode="graph") if is_warned else drawn


def _adds_sum_to_other(parts: Parts) -> bool:
    """Whether a loss adds a sum over rows to something else: eagerly, a warning."""
    if parts.end == "mean and sum":
        return True
    if parts.where in ("train_step", "compute_loss"):
        return parts.is_regularized and "sum" in parts.end
    is_added_up = parts.step == "own tape" and parts.where == "add_loss"
    return is_added_up and parts.end in ("sum", "half of the sum", "vector")
