"""What is changed in Keras for the time of a fit is as before when the fit is over."""

import contextlib
import gc
import re
import signal
import weakref
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from harness.claims import shortened
from harness.models import make_compiled, normalized

import keras_dist
from keras_dist import private

DRAWS = [f"stateless_{name}" for name in ("random_normal_v2", "multinomial")]
DRAWS += ["stateless_random_gamma_v3", "stateless_truncated_normal_v2"]

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "architecture.md"


class Broken(keras.callbacks.Callback):
    """Raises at one moment of a fit."""

    def __init__(self, moment):
        super().__init__()
        setattr(self, moment, self.fail)

    def fail(self, *args, **kwargs):
        """Raises."""
        raise KeyError("tea")


def make():
    """A model with all that is changed: loss, rate, synchronized statistics."""
    sgd = keras.optimizers.SGD(0.1)
    return make_compiled(normalized, sgd, "mse", metrics=["accuracy"])


def patched(model):
    """Each thing of the table in `docs/concepts/architecture.md`, as it is now."""
    methods = (
        keras.optimizers.Optimizer.apply,
        keras.losses.Loss.__call__,
        keras.Model._aggregate_additional_loss,
        "_aggregate_additional_loss" in vars(keras.Model),
        tf.GradientTape.gradient,
        keras.metrics.Mean.update_state,
    )
    return {
        "class of the model": type(model),
        "class of the outermost optimizer": type(model.optimizer),
        "class of each innermost optimizer": (
            type(model.optimizer).learning_rate,
            type(model.optimizer).assign_add,
            type(model.optimizer).assign_sub,
        ),
        "class of `BatchNormalization`": [type(layer) for layer in model.layers],
        "class of the model's losses and `Mean` trackers": type(model.metrics[0]),
        "`Optimizer.apply`": methods,
        "`tf.function` calls": type(tf.function(patched)).__call__,
        "TensorFlow's stateless random operations": [
            *(getattr(private.random_operations(name), name) for name in DRAWS),
            private.stateful_random_operations().random_uniform,
        ],
        "Keras's generator": private.keras_state().get(private.SEED_GENERATOR),
        "`experimental_distribute_dataset`": type(
            tf.distribute.get_strategy()
        ).experimental_distribute_dataset,
        "`jit_compile`": (model.jit_compile, model.train_function),
        "attributes of metrics": [
            vars(metric).get("result") for metric in model.metrics
        ],
        "handlers of SIGTERM": signal.getsignal(signal.SIGTERM),
    }


def test_the_table_has_every_row_that_is_tried():
    """And each that it has is tried."""
    _, section = PAGE.read_text().split("## Changes to Keras during a fit")
    section = section.split("## ")[0]
    rows = [line.split("|")[1].strip() for line in re.findall(r"^\|.*", section, re.M)]
    keys = list(patched(make()))
    assert len(rows) == len(keys) + 2  # the head and the line below it
    for row, key in zip(rows[2:], keys, strict=True):
        assert row.startswith(key), row


MOMENTS = ["on_epoch_begin", "on_train_batch_end"]


@pytest.mark.parametrize("moment", shortened([None, *MOMENTS], {MOMENTS[1]}))
def test_all_of_it_is_taken_back(rows, folder, moment):
    """Also when the fit raised, in the middle of an epoch or at its edge."""
    x, y = rows
    model = make()
    before = patched(model)
    names = set(vars(model))
    given = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": rows}
    given |= {"lr_scaling": 2.0, "resume": f"{folder}/resume"}
    given["callbacks"] = [Broken(moment)] if moment else []
    raises = pytest.raises((KeyError, RuntimeError), match="tea")
    with raises if moment else contextlib.nullcontext():
        keras_dist.dist_fit(model, x, y, **given)
    assert patched(model) == before
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    of_keras = {"history", "_callbacks", "stop_evaluating", "_eval_epoch_iterator"}
    assert set(vars(model)) - names <= {"_traced_functions"} | of_keras
    assert not model.__dict__.get("stop_training", False) or moment
    model.fit(x, y, epochs=1, verbose=0)


def fit_with_classes_of_its_own(x, y):
    """Return a weak reference to what each class of the user's closes over."""
    held = [type("Held", (), {})() for _ in range(5)]
    of_model, of_layer, of_optimizer, of_metric, of_loss = held

    class Model(keras.Sequential):
        keeps = staticmethod(lambda: of_model)

    class Layer(keras.layers.BatchNormalization):
        keeps = staticmethod(lambda: of_layer)

    class Optimizer(keras.optimizers.SGD):
        keeps = staticmethod(lambda: of_optimizer)

    class Metric(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            assert of_metric is not None
            super().update_state(tf.reduce_mean(p))

    class Loss(keras.losses.MeanSquaredError):
        keeps = staticmethod(lambda: of_loss)

    model = Model([Layer(synchronized=True), keras.layers.Dense(1)])
    model.compile(Optimizer(0.1), Loss(), metrics=[Metric()], jit_compile=False)
    keras_dist.dist_fit(model, x, y, batch_size=40, lr_scaling=2.0, verbose=0)
    keras_dist.DistributedModel(model).evaluate(x, y, verbose=0)
    return list(map(weakref.ref, held))


@pytest.mark.several_ranks
def test_classes_of_the_user_are_freed(rows):
    """With all that they close over, as under `model.fit`."""
    alive = fit_with_classes_of_its_own(*rows)
    keras.backend.clear_session()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 5
