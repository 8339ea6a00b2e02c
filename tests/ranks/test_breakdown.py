"""`Throughput(breakdown=True)` divides the time, and changes nothing else."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from claims import largest_difference

import keras_dist

FRACTIONS = ("computing", "averaging", "waiting", "input")


@pytest.mark.parametrize(
    "compiled",
    [
        {},
        pytest.param(
            {"run_eagerly": False, "jit_compile": False, "steps_per_execution": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"run_eagerly": False, "jit_compile": True},
            marks=pytest.mark.several_ranks,
        ),
        pytest.param(
            {"optimizer": {"gradient_accumulation_steps": 2}}, marks=pytest.mark.long
        ),
    ],
)
def test_fractions_add_up_and_the_model_is_the_same(world, rows, make_model, compiled):
    """Eagerly, with several steps of one execution, under XLA, and accumulated."""
    compiled = dict(compiled)
    options = compiled.pop("optimizer", {})
    x, y = (array[:96] for array in rows)  # XLA compiles batches of one size only
    models, logs = [], None
    for breakdown in (False, True):
        model = make_model(keras.optimizers.SGD(0.1, **options), **compiled)
        throughput = keras_dist.Throughput(breakdown)
        history = keras_dist.dist_fit(
            model, x, y, batch_size=16, epochs=2, verbose=0, callbacks=[throughput]
        ).history
        models.append(model)
        assert set(FRACTIONS) <= set(history) or not breakdown
        logs = history
    assert largest_difference(*models) == 0
    for fractions in zip(*(logs[name] for name in FRACTIONS), strict=True):
        assert sum(fractions) == pytest.approx(1)
        assert min(fractions) >= -1e-9
        assert (fractions[1] > 0) == (world.size > 1)


@pytest.mark.several_ranks
@pytest.mark.three_ranks
def test_the_slowest_rank_is_named(world, rows, capsys):
    """The last rank sleeps in each step: the others wait for it."""
    last = world.size - 1

    class Sleeps(keras.layers.Layer):
        def call(self, x):
            time.sleep(0.1 * (world.rank == last))
            return x

    model = keras.Sequential([Sleeps(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    keras_dist.dist_fit(
        model,
        *rows,
        batch_size=8,
        verbose=2,
        callbacks=[keras_dist.Throughput(breakdown=True)],
    )
    printed = capsys.readouterr().out
    assert (f"waiting (for rank {last} in " in printed) == (world.rank == 0)


def test_work_inside_of_a_graph_is_computing(rows):
    """Not input, whenever TensorFlow runs the op that reads the clock."""

    def nap(x):
        time.sleep(0.05)
        return x

    class Sleeps(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.numpy_function(nap, [x], x.dtype)]):
                return tf.identity(x)

    model = keras.Sequential([Sleeps(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=False, jit_compile=False)
    history = keras_dist.dist_fit(
        model,
        *rows,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[keras_dist.Throughput(breakdown=True)],
    ).history
    assert history["computing"][1] > 0.5 > history["input"][1]


def test_slow_input_is_measured(world, rows, make_model):
    """The fraction of input is larger if each batch is slept for."""
    x, y = rows

    def batches(seconds):
        for start in range(0, 96, 8):
            time.sleep(seconds)
            yield x[start : start + 8], y[start : start + 8]

    found = []
    for seconds in (0.0, 0.2):
        data = tf.data.Dataset.from_generator(
            lambda seconds=seconds: batches(seconds),
            output_signature=(
                tf.TensorSpec((None, 5), tf.float32),
                tf.TensorSpec((None,), tf.float32),
            ),
        )
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        history = keras_dist.dist_fit(
            make_model(),
            data.with_options(options),
            verbose=0,
            callbacks=[keras_dist.Throughput(breakdown=True)],
        ).history
        found += history["input"]
    assert found[1] > found[0]
    assert np.isfinite(found).all()
