"""Every optimizer of Keras: N ranks give the state of one process."""

import inspect

import keras
import numpy as np
import pytest
from claims import assert_equal_to_the_bit, largest_difference

import keras_dist

pytestmark = pytest.mark.several_ranks

# Arguments that each optimizer is tried with, beside its rate. One that Keras adds is
# not in this table yet, and fails the test of completeness below.
ARGUMENTS = {
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

# They hold other optimizers, or are none; tried in tests of their own.
OTHERS = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap"}

RATE = 0.01


def names():
    """All classes of `keras.optimizers`."""
    return {
        name
        for name, member in vars(keras.optimizers).items()
        if inspect.isclass(member)
    }


def make_model(optimizer):
    """A model with a constraint, regularizers and a loss of its own activity."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer=keras.regularizers.L2(0.01),
                bias_constraint=keras.constraints.MaxNorm(0.05),
            ),
            keras.layers.ActivityRegularization(l2=0.01),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer, "binary_crossentropy", run_eagerly=True)
    return model


def oracle(make, rows, world, seed=None):
    """One process with the global batch; with a seed, each batch in another order."""
    x, y = rows
    if seed is not None:
        generator = np.random.default_rng(seed)
        order = np.arange(len(x)).reshape(-1, 8 * world.size)
        order = generator.permuted(order, axis=1).ravel()
        x, y = x[order], y[order]
    model = make_model(make(RATE * world.size))
    model.fit(x, y, batch_size=8 * world.size, epochs=1, shuffle=False, verbose=0)
    for part in getattr(model.optimizer, "optimizers", [model.optimizer]):
        part.learning_rate = RATE
    return model


def check(make, rows, world):
    """The claim, with the tolerance that the optimizer itself asks for."""
    x, y = (array[:96] for array in rows)
    expected = oracle(make, (x, y), world)
    model = make_model(make(RATE))
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert_equal_to_the_bit(model)
    tolerance = 1e-5
    difference = largest_difference(model, expected)
    if difference > tolerance:
        # A sign, or a division by a small moment, makes more of rounding: as much as
        # between runs of one process that sum the same batches in another order.
        tolerance = max(
            largest_difference(oracle(make, (x, y), world, seed), expected)
            for seed in range(3)
        )
    assert difference <= tolerance, f"{difference:.1e} > {tolerance:.1e}"


def test_every_optimizer_of_keras_is_tried():
    """What the newest Keras adds has to be added to the table."""
    assert names() - OTHERS <= set(ARGUMENTS)


# On three ranks those whose state or clipping couples variables; averaging, which is
# ours, is the same code for all.
ON_THREE = {"Adafactor", "Adam", "Nadam", "RMSprop", "SGD"}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ON_THREE else pytest.param(name, marks=pytest.mark.two_ranks)
        for name in ARGUMENTS
    ],
)
def test_an_optimizer_equals_one_process(world, rows, name):
    """Weights and state, with its clipping, decay, averages and constraints."""
    if name not in names():
        pytest.skip(f"this Keras has no {name}")
    cls = getattr(keras.optimizers, name)
    check(lambda rate: cls(learning_rate=rate, **ARGUMENTS[name]), rows, world)


@pytest.mark.parametrize("is_callable", [False, True])
def test_several_optimizers_in_one(world, rows, is_callable):
    """`MultiOptimizer`: every part averages and is scaled, also those found late."""
    if "MultiOptimizer" not in names():
        pytest.skip("this Keras has no MultiOptimizer")

    def make(rate):
        biases, others = keras.optimizers.SGD(rate), keras.optimizers.Adam(rate)
        if is_callable:
            return keras.optimizers.MultiOptimizer(
                lambda variable: biases if "bias" in variable.path else others
            )
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(others, {".*bias": biases})
        )

    check(make, rows, world)


def test_gradients_are_accumulated_as_on_one_process(world, rows):
    """An update every three batches, clipped after averaging."""

    def make(rate):
        return keras.optimizers.SGD(
            rate, momentum=0.9, clipnorm=0.02, gradient_accumulation_steps=3
        )

    check(make, rows, world)
