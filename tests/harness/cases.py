"""Cases that must equal one process: the rows of `docs/equivalence.md`.

Each case trains on one process with the global batch, by plain Keras, and on all ranks.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

import keras_dist
from harness.claims import (
    EXACT,
    KERAS,
    assert_equal_to_the_bit,
    difference_of_states,
    distribute_jobs,
    models_in,
    read_by_keras,
    state_of,
)
from harness.models import SUBJECTS, make_compiled

RATE = 0.01
EPOCHS = 2

# Tolerances in float16 and bfloat16: a few roundings of a number.
HALF = 2.0**-8
BRAIN = 2.0**-5


@dataclass(frozen=True)
class Case:
    """One configuration of model, optimizer, data and options.

    Args:
        part: The topic.
        name: Name of the case, in words.
        subject: Name of the model in `models.SUBJECTS`.
        optimizer: Makes the optimizer for a learning rate.
        rows: How many rows there are.
        batch_size: Of one rank.
        compiled: Arguments of `compile`.
        arguments: Of both `fit` and `dist_fit`; arrays have a value for each row.
        options: Of `dist_fit` alone.
        averaging: Options of `DistributedOptimizer`, on all ranks.
        factor: On the learning rate of one process, as a function of the ranks.
        tolerance: Largest relative difference, if no optimizer amplifies rounding.
        tested: Whether the tests run it on "two" or on "three" ranks; "" for neither.
        is_shared_tested: Whether they run it with `batch="global"`, too.
        dtype: Of the model, unless the subject sets another.
        is_global: Whether the ranks share the batches, by `batch="global"`.
    """

    part: str
    name: str
    subject: str = "perceptron"
    optimizer: Callable[[float], Any] = keras.optimizers.SGD
    rows: int = 48
    batch_size: int = 8
    compiled: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    averaging: dict[str, Any] = field(default_factory=dict)
    factor: Callable[[int], float] = float
    tolerance: float = 1e-5
    tested: str = ""
    is_shared_tested: bool = False
    dtype: str = "float32"
    is_global: bool = False

    @property
    def title(self) -> str:
        """Part and name, which no other case has."""
        shared = ', batch="global"' * self.is_global
        return f"{self.part}: {self.name}{shared}"

    @property
    def shared(self) -> "Case":
        """The same with `batch="global"`: one process is the same script."""
        options = {"batch": "global"} | self.options
        keeps_factor = "lr_scaling" in self.options
        factor = self.factor if keeps_factor else lambda size: 1.0
        return replace(self, options=options, factor=factor, is_global=True)

    def global_batch(self, size: int) -> int:
        """Rows of all ranks in a step; shared ones do not divide evenly."""
        return self.batch_size * size - self.is_global

    def oracle(self) -> Any:
        """Weights and optimizer state of one process, as arrays."""
        with models_in(self.dtype):
            return state_of(self._on_one_process(keras_dist.size()))

    def compare(self, expected: Any) -> tuple[float, float, str]:
        """Train on all ranks, which must hold the same bits.

        Returns:
            The largest relative difference from `oracle()`, the tolerance that holds,
            and the dtype of both.
        """
        with models_in(self.dtype):
            model = self._on_all_ranks()
        assert_equal_to_the_bit(model)
        difference = difference_of_states(state_of(model), expected)
        if difference <= self.tolerance or self.dtype == "float64":
            return difference, self.tolerance, self.dtype
        # A sign, or a division by a small moment, amplifies rounding, which vanishes in
        # float64; a bug does not.
        exact = replace(self, dtype="float64", tolerance=EXACT)
        [expected] = distribute_jobs([exact.oracle])
        return exact.compare(expected)

    def _on_all_ranks(self) -> Any:
        x, y = SUBJECTS[self.subject].rows(self.rows)
        model = self._compiled(self.subject, RATE)
        if self.averaging:
            keras_dist.DistributedOptimizer(model.optimizer, **self.averaging)
        options = {"shuffle": False, "epochs": EPOCHS} | self.arguments | self.options
        keras.utils.set_random_seed(5)  # determines the order of the rows
        size = keras_dist.size()
        batch_size = self.global_batch(size) if self.is_global else self.batch_size
        keras_dist.dist_fit(model, x, y, batch_size=batch_size, verbose=0, **options)
        return model

    def _on_one_process(self, size: int) -> Any:
        x, y = SUBJECTS[self.subject].rows(self.rows)
        model = self._compiled(self.subject, RATE * self.factor(size))
        if type(model.optimizer).__name__ == "ScheduleFreeAdamW" and model.built:
            # Keras gives its state the first values only outside of a graph.
            model.optimizer.build(model.trainable_variables)
        rows = np.arange(self.rows)
        if self.arguments.get("shuffle"):
            rows = np.concatenate(read_by_keras(self.rows, seed=5))
        arguments = {
            name: value[rows] if isinstance(value, np.ndarray) else value
            for name, value in self.arguments.items()
        }
        model.fit(
            *keras.tree.map_structure(lambda leaf: leaf[rows], (x, y)),
            batch_size=self.global_batch(size),
            epochs=EPOCHS,
            verbose=0,
            **arguments | {"shuffle": False},
        )
        for leaf in getattr(model.optimizer, "optimizers", [model.optimizer]):
            leaf.learning_rate = RATE
        return model

    def _compiled(self, name: str, rate: float) -> Any:
        subject = SUBJECTS[name]
        compiled = {"loss": subject.loss, "run_eagerly": True} | self.compiled
        return make_compiled(subject.make, self.optimizer(rate), **compiled)


# Arguments that each optimizer is tried with, beside its rate. One that Keras adds is
# not in this table yet, and fails the test of completeness.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.01},
    "Adamax": {"clipvalue": 0.01},
    "Ftrl": {},
    "Lamb": {},
    "Lion": {},
    "Muon": {},
    "Nadam": {"global_clipnorm": 0.02},
    "RMSprop": {"momentum": 0.5, "centered": True, "clipnorm": 0.02},
    "SGD": {"momentum": 0.9, "nesterov": True, "use_ema": True, "weight_decay": 0.01},
    "ScheduleFreeAdamW": {},
}

# They hold other optimizers, or are none; tried in cases of their own.
OTHERS = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap"}

if KERAS < (3, 13):  # plain `fit` with it raises
    del OPTIMIZERS["Muon"]
    OTHERS.add("Muon")


def optimizer_names() -> set[str]:
    members = vars(keras.optimizers).items()
    return {name for name, member in members if inspect.isclass(member)}


def sgd(rate: float, **arguments: Any) -> Any:
    return keras.optimizers.SGD(rate, **arguments)


def momentum(rate: float, **arguments: Any) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9, **arguments)


def adam(rate: float, **arguments: Any) -> Any:
    return keras.optimizers.Adam(rate, **arguments)


def every_second(rate: float) -> Any:
    """Adam with two batches an update."""
    return adam(rate, gradient_accumulation_steps=2)


def several(rate: float, is_callable: bool) -> Any:
    """Adam, and SGD for the biases."""
    biases, others = keras.optimizers.SGD(rate), keras.optimizers.Adam(rate)
    if is_callable:
        return keras.optimizers.MultiOptimizer(
            lambda variable: biases if "bias" in variable.path else others
        )
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(others, {".*bias": biases})
    )


def _optimizers() -> dict[str, Any]:
    """By name: one process and ranks have the same, of each class of Keras."""
    made = {
        f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})": (
            functools.partial(getattr(keras.optimizers, name), **arguments)
        )
        for name, arguments in OPTIMIZERS.items()
        if name in optimizer_names()
    }
    if "MultiOptimizer" in optimizer_names():
        made["MultiOptimizer of a map"] = functools.partial(several, is_callable=False)
        by_function = functools.partial(several, is_callable=True)
        made["MultiOptimizer of a function"] = by_function
    return made


# How tests run a case: on two ranks, on three, or (without either) not at all, since
# other tests, or cases beside it, are so like it that they can spare the time.
ON_TWO, ON_THREE = {"tested": "two"}, {"tested": "three"}
# Tests run it with `batch="global"`, too, on three ranks; `make equivalence` all.
SHARED = {"is_shared_tested": True}

GRAPH, LONG = {"run_eagerly": False}, {"rows": 101}
IN_GRAPH, XLA = {"compiled": GRAPH}, {"compiled": GRAPH | {"jit_compile": True}}
WITHOUT_XLA = {"compiled": GRAPH | {"jit_compile": False}}
WEIGHTS = np.linspace(0.1, 2, 101).astype("float32")
BY_CLASS = {0: 0.3, 1: 2.0}
ADDS_UP = {"loss": keras.losses.BinaryCrossentropy(reduction="sum")}


def _steps(count: int) -> dict[str, Any]:
    return {"compiled": GRAPH | {"steps_per_execution": count}}


def _given(**arguments: Any) -> dict[str, Any]:
    return {"arguments": arguments}


def _sends(dtype: str, tolerance: float) -> dict[str, Any]:
    return LONG | {"averaging": {"compression": dtype}, "tolerance": tolerance}


def _every_third(rate: float) -> Any:
    return momentum(rate, clipnorm=0.02, gradient_accumulation_steps=3)


def _schedule_free(rate: float) -> Any:
    return keras.optimizers.ScheduleFreeAdamW(rate, gradient_accumulation_steps=2)


def _rmsprop(rate: float) -> Any:
    return keras.optimizers.RMSprop(rate, momentum=0.5, clipnorm=0.02)


# Those of `_optimizers` that tests try, with the regularized model.
_TESTED = {
    # Its clipping couples variables; averaging, which is ours, is the same for all.
    "Nadam(global_clipnorm=0.02)": ON_THREE,
    "SGD(momentum=0.9, nesterov=True, use_ema=True, weight_decay=0.01)": ON_TWO,
    "MultiOptimizer of a function": ON_TWO,
}

# By part and name: the model, the optimizer, and further arguments of `Case`.
_CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "optimizers": {
        name: ("regularized", made, _TESTED.get(name, {}))
        for name, made in _optimizers().items()
    }
    | {"ScheduleFreeAdamW in a graph": ("perceptron", _schedule_free, IN_GRAPH)},
    "accumulation": {
        "three batches, clipped": ("regularized", _every_third),
        "two batches, 101 rows": ("perceptron", every_second, LONG, SHARED),
        "two batches, odd epochs, in a graph": (
            *("perceptron", every_second, LONG, _steps(2)),
            {"batch_size": 15},
        ),
        "two batches of an embedding": ("embedding", every_second),
        "mixed_float16 with two batches": ("half", every_second, {"tolerance": HALF}),
    },
    "data": {
        "101 rows": ("perceptron", momentum, LONG),
        "101 rows, shuffled": (
            *("perceptron", adam, LONG, _given(shuffle=True), {"batch_size": 9}),
            ON_TWO,
        ),
        "a last batch of four rows": ("perceptron", momentum, {"rows": 52}),
        "sample_weight": ("perceptron", adam, LONG, _given(sample_weight=WEIGHTS)),
        "class_weight": ("perceptron", adam, LONG, _given(class_weight=BY_CLASS)),
    },
    "mixed precision": {
        f"{policy}{scaled}, {loss}": (
            *(f"{policy}, {loss}", momentum, LONG, WITHOUT_XLA, {"tolerance": most}),
            {} if is_like or "row" in loss else ON_TWO,
        )
        for policy, scaled, most in (
            ("mixed_float16", " with its loss scale", HALF),
            ("mixed_bfloat16", "", BRAIN),
        )
        for loss in ("a mean", "add_loss of a sum", "a loss for each row")
        for is_like in [loss == "a mean" or most == BRAIN]
    }
    | {
        "mixed_float16": ("half", momentum, {"tolerance": HALF}, SHARED),
        "mixed_bfloat16": ("brain", momentum, {"tolerance": BRAIN}),
        "bfloat16": ("all brain", momentum, {"tolerance": 2 * BRAIN}),
    },
    "XLA": {
        "SGD": ("perceptron", momentum, LONG, XLA),
        "Adam, two batches an update": ("perceptron", every_second, XLA),
        "a convolution": ("convolution", adam, XLA),
    },
    "embeddings": {
        "SGD, sent whole": ("embedding", momentum),
        "SGD, sent as rows": ("large embedding", momentum, LONG, SHARED),
        "as rows, in a graph": ("large embedding", sgd, IN_GRAPH),
        "Adam, with XLA": ("embedding", adam, XLA),
        "Adam, clipped, in a graph": (
            *("embedding", functools.partial(adam, clipnorm=0.02), IN_GRAPH),
        ),
    }
    | {
        name: ("embedding", made, LONG)
        for name, made in _optimizers().items()
        # A centered RMSprop is an error of Keras 3.15 itself, also on one process,
        # where rows come twice.
        if "centered" not in name
    }
    | {"RMSprop(momentum=0.5, clipnorm=0.02)": ("embedding", _rmsprop, LONG)},
    "ways to train": {
        "Sequential without Input": ("unbuilt", momentum),
        "dicts in and out": ("two inputs", adam),
        "repeated layer names": ("repeated names", momentum),
        "compute_loss, add_loss, a spare variable": ("own loss", momentum, ON_TWO),
        "a train_step of one's own": ("own step", adam),
        "pictures": ("convolution", adam),
        "four steps an execution, and a tail": (
            *("perceptron", momentum, _steps(4), {"batch_size": 7}),
        ),
    },
    "statistics": {
        "BatchNormalization(synchronized=True)": (
            *("normalized", sgd, {"rows": 95}, SHARED),
        ),
        "the same, Adam, in a graph": ("normalized", adam, {"rows": 95}, IN_GRAPH),
        "the same, two steps an execution": (
            *("normalized", adam, {"rows": 95}, _steps(2)),
        ),
        "the same in float64, where rounding cannot hide an error": (
            *("normalized", functools.partial(adam, global_clipnorm=0.05)),
            {"rows": 18, "batch_size": 4, "tolerance": EXACT, "dtype": "float64"},
            ON_TWO,
        ),
    },
    "losses": {
        "padded words": ("tagger", momentum, LONG, ON_THREE),
        'reduction="sum"': (
            *("regularized", momentum, LONG, SHARED, {"compiled": ADDS_UP}),
        ),
    },
    "options": {
        'op="sum"': (
            *("perceptron", sgd, {"options": {"lr_scaling": "none"}}, ON_TWO),
            {"averaging": {"op": "sum"}},
        ),
        'compression="fp16"': ("perceptron", momentum, _sends("fp16", HALF), ON_TWO),
        'compression="bf16"': ("perceptron", momentum, _sends("bf16", BRAIN)),
        'lr_scaling="sqrt"': (
            *("perceptron", sgd, {"options": {"lr_scaling": "sqrt"}}),
            {"factor": math.sqrt},
        ),
    },
}

CASES = [
    Case(part, name, subject, optimizer, **functools.reduce(operator.or_, more, {}))
    for part, named in _CASES.items()
    for name, (subject, optimizer, *more) in named.items()
    if "ScheduleFree" not in name or "ScheduleFreeAdamW" in optimizer_names()
]
