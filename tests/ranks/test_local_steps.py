"""`sync="every:k"`: each rank makes k local steps; the oracle makes those of all."""

import keras
import numpy as np
import pytest
from claims import assert_equal_to_the_bit, largest_difference, raises_everywhere

import keras_dist
from keras_dist.comm import transport

pytestmark = pytest.mark.several_ranks

BATCH, ROWS = 8, 96
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def local_sgd(make, x, y, *, every, outer_momentum, epochs):
    """The same by plain Keras on one process, one model for each rank."""
    size = keras_dist.size()
    models = [make() for _ in range(size)]
    steps = len(x) // size // BATCH
    for model in models:
        model.optimizer.build(model.trainable_variables)
    variables = [[m.trainable_variables, m.optimizer.variables] for m in models]
    anchors = [v.numpy() for v in variables[0][0]]
    velocities = [np.zeros_like(anchor) for anchor in anchors]

    def synchronize(kind, move):
        for column in zip(*(own[kind] for own in variables), strict=True):
            if column[0].shape:
                new = move(np.mean([v.numpy() for v in column], axis=0))
                for variable in column:
                    variable.assign(new)

    def average():
        indices = iter(range(len(anchors)))

        def move(mean):
            index = next(indices)
            step = outer_momentum * velocities[index] + (mean - anchors[index])
            velocities[index], anchors[index] = step, anchors[index] + step
            return anchors[index]

        synchronize(0, move)

    for _ in range(epochs):
        for step in range(steps):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            for rank, model in enumerate(models):
                model.train_on_batch(x[rank::size][rows], y[rank::size][rows])
            if (step + 1) % every == 0 or step + 1 == steps:
                average()
        synchronize(1, lambda mean: mean)
    return models[0]


@pytest.mark.parametrize(
    ("outer_momentum", "optimizer", "compiled"),
    [
        (0.0, lambda: keras.optimizers.SGD(**SGD), {}),
        pytest.param(
            0.5,
            lambda: keras.optimizers.SGD(**SGD),
            {},
            marks=pytest.mark.three_ranks,
        ),
        pytest.param(
            0.5,
            lambda: keras.optimizers.Adam(0.01),
            {"run_eagerly": False, "jit_compile": False, "steps_per_execution": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(
            0.0,
            lambda: keras.optimizers.Adam(0.01),
            {"run_eagerly": False, "jit_compile": True},
        ),
    ],
)
def test_local_sgd_equals_its_simulation_on_one_process(
    world, rows, make_model, outer_momentum, optimizer, compiled
):
    """Weights, momenta and the outer momentum; several steps of one call; under XLA."""
    x, y = (array[:ROWS] for array in rows)
    own = x[world.rank :: world.size], y[world.rank :: world.size]
    model = make_model(optimizer(), **compiled)
    keras_dist.dist_fit(
        model,
        *own,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        shard="none",
        lr_scaling="none",
        sync="every:3",
        outer_momentum=outer_momentum,
    )
    assert_equal_to_the_bit(model)
    expected = local_sgd(
        lambda: make_model(optimizer()),
        x,
        y,
        every=3,
        outer_momentum=outer_momentum,
        epochs=2,
    )
    # Adam divides by small numbers: on three ranks sums in another order show.
    assert largest_difference(model, expected) < 2e-5


def test_the_ranks_exchange_weights_every_k_steps(rows, make_model, monkeypatch):
    """Weights every four of six steps and at the end; no gradient ever."""
    names = []
    own = transport.allreduce

    def recorded(link, tensor, *more, name):
        names.append(name)
        return own(link, tensor, *more, name=name)

    monkeypatch.setattr(transport, "allreduce", recorded)
    x, y = rows
    total = 6 * BATCH * keras_dist.size()
    x, y = np.tile(x, (3, 1))[:total], np.tile(y, 3)[:total]
    keras_dist.dist_fit(make_model(), x, y, batch_size=8, verbose=0, sync="every:4")
    assert not [name for name in names if "gradients" in name]
    weights = [n for n in names if "weights" in n and not n.endswith("rows")]
    assert len(weights) == 2


def test_a_stop_request_is_agreed_when_weights_are_averaged(world, rows, make_model):
    """The last rank requests it after its first batch; all stop after their third."""
    steps = []

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            if world.rank == world.size - 1:
                self.model.stop_training = True

    keras_dist.dist_fit(
        make_model(),
        *rows,
        batch_size=4,
        verbose=0,
        epochs=3,
        callbacks=[Stops()],
        sync="every:3",
    )
    # The stop request is sent with the weights, here after the third step.
    assert keras_dist.gather(len(steps)) == [3] * world.size


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync": "every:0"},
        {"sync": "never"},
        {"sync": 8},
        {"outer_momentum": 0.5},
        {"sync": "every:8", "outer_momentum": 1.0},
        {"sync": "every:8", "op": "sum"},
        {"sync": "every:8", "compression": "fp16"},
    ],
)
def test_unusable_options_are_errors(rows, make_model, wrong):
    """On all ranks, before anything is sent."""
    messages = raises_everywhere(
        ValueError, lambda: keras_dist.dist_fit(make_model(), *rows, **wrong)
    )
    assert all("Received" in message for message in messages)
