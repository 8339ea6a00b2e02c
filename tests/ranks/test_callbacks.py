"""Callbacks act alike on every rank, with `model.fit` and with `dist_fit`."""

import logging

import keras
import pytest
import tensorflow as tf
from harness.claims import (
    assert_equal_to_the_bit,
    assert_equals_one_process,
    assert_same_bits,
    largest_difference,
    raises_everywhere,
    state_of,
    warned,
)
from harness.models import update

import keras_dist

FIT = {"shuffle": False, "verbose": 0}


def shard(rows, world):
    """This rank's rows, sharded by hand as for a plain `model.fit`."""
    return tuple(array[:96][world.rank :: world.size] for array in rows)


@pytest.mark.parametrize(
    "is_jitted",
    [False, pytest.param(True, marks=[pytest.mark.several_ranks, pytest.mark.long])],
)
def test_callbacks_alone_train_like_one_process(world, rows, make_model, is_jitted):
    """Plain `model.fit`, our optimizer and our callbacks one by one."""

    def make():
        compiled = {"jit_compile": is_jitted, "run_eagerly": False}
        return make_model(keras.optimizers.SGD(0.1), seed=world.rank + 3, **compiled)

    def fit(model, *data, validation_data, **given):
        keras_dist.DistributedOptimizer(model.optimizer)
        ours = [
            keras_dist.AverageStatistics(),
            keras_dist.MetricAverage(),
            keras_dist.LearningRateWarmup(0),
            keras_dist.Throughput(),
            keras_dist.StopTogether(),
            keras_dist.BroadcastVariables(),
        ]
        given |= {"validation_data": shard(validation_data, world), "callbacks": ours}
        return model.fit(*shard(data, world), **given)

    data = tuple(array[:96] for array in rows)
    how = {"fit": fit, "factor": world.size, "validation_data": data, "epochs": 2}
    _, logs, oracle = assert_equals_one_process(make, data, **how)
    assert set(logs) == {*oracle.history, "rows_per_second"}


@pytest.mark.several_ranks
def test_our_callbacks_may_stand_in_any_order(world, rows):
    """One of the user's between them reads all logs, and statistics of all ranks."""

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(("rows_per_second" in logs, self.model.get_weights()[2]))

    seen, kinds = [], [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *kinds])
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    ours = [keras_dist.StopTogether(), keras_dist.BroadcastVariables(), Reads()]
    ours += [keras_dist.AverageStatistics(), keras_dist.Throughput()]
    model.fit(*shard(rows, world), batch_size=8, callbacks=ours, epochs=2, **FIT)
    for is_logged, mean in seen:
        assert is_logged
        assert_same_bits([mean], keras_dist.broadcast([mean]))
    assert len(seen) == 2


class Interrupts(keras.callbacks.Callback):
    """The user's Ctrl-C, after the second batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


NEXT = ["fit", "dist_fit", "train_on_batch", "compile"]


@pytest.mark.several_ranks
@pytest.mark.parametrize("how", NEXT)
def test_a_fit_that_raised_leaves_nothing_to_the_next(world, rows, make_model, how):
    """Which broadcasts what the first rank restored, and scales rates if it says so."""
    x, y = (array[:96] for array in rows)
    size, restored = world.size, make_model(seed=5).get_weights()
    oracle = make_model(keras.optimizers.SGD(0.1 * size))
    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    ours = [keras_dist.StopTogether(), keras_dist.BroadcastVariables()]
    callbacks = [keras_dist.LearningRateWarmup(0), *ours, Interrupts()]
    with pytest.raises(KeyboardInterrupt):
        oracle.fit(x, y, batch_size=8 * size, callbacks=[Interrupts()], **FIT)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*shard(rows, world), batch_size=8, callbacks=callbacks, **FIT)
    oracle.set_weights(restored)
    if world.rank == 0 or "fit" not in how:
        model.set_weights(restored)
    if how == "dist_fit":
        keras_dist.dist_fit(model, x, y, batch_size=8, **FIT)
    elif how == "fit":
        model.fit(*shard(rows, world), batch_size=8, callbacks=ours, **FIT)
    elif how == "train_on_batch":
        model.train_on_batch(*shard(rows, world))
    else:
        model.compile(model.optimizer)
    oracle.optimizer.learning_rate = 0.1 * (size if how == "dist_fit" else 1)
    if "fit" in how:
        oracle.fit(x, y, batch_size=8 * size, **FIT)
    elif how == "train_on_batch":
        oracle.train_on_batch(x, y)
    oracle.optimizer.learning_rate = 0.1
    assert largest_difference(model, oracle) < 1e-5
    assert_equal_to_the_bit(model)
    assert type(model) is keras.Sequential


def test_a_fit_in_a_callback_does_not_end_that_around_it(world, rows, make_model):
    """Both train as on one process, at the scaled rate."""
    size = world.size

    def fit(model, data, batch_size, *callbacks):
        def train_again(epoch, logs):
            model.fit(*data, batch_size=batch_size, **FIT)

        again = keras.callbacks.LambdaCallback(on_epoch_end=train_again)
        given = {"batch_size": batch_size, "callbacks": [*callbacks, again]} | FIT
        return model.fit(*data, epochs=2, **given).history["loss"]

    oracle = make_model(keras.optimizers.SGD(0.1 * size))
    losses = fit(oracle, [array[:96] for array in rows], 8 * size)
    model = make_model(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    ours = [keras_dist.MetricAverage(), keras_dist.LearningRateWarmup(0)]
    found = fit(model, shard(rows, world), 8, *ours, keras_dist.BroadcastVariables())
    assert found == pytest.approx(losses, abs=2e-6)
    oracle.optimizer.learning_rate = 0.1
    assert largest_difference(model, oracle) < 1e-5
    assert_equal_to_the_bit(model)


@pytest.mark.parametrize(
    "is_eager", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_dist_fit_in_a_callback_leaves_the_outer_one_as_it_was(
    rows, make_model, is_eager
):
    """Its step, its rows and its rate, though it is one of the same model."""
    x, y = rows
    compiled = {"run_eagerly": is_eager, "jit_compile": False}

    def train(fit, inner_rate, outer_rate):
        model = make_model(keras.optimizers.SGD(0.1), **compiled)

        def train_again(epoch, logs):
            losses.extend(fit(model, x[:40], y[:40], inner_rate).history["loss"])

        again, losses = keras.callbacks.LambdaCallback(on_epoch_end=train_again), []
        given = {"epochs": 3, "callbacks": [again]}
        losses += fit(model, x, y, outer_rate, **given).history["loss"]
        return model, losses

    def fit_plainly(model, x, y, rate, **given):
        before = float(model.optimizer.learning_rate)
        model.optimizer.learning_rate = rate
        history = model.fit(x, y, batch_size=24, **given, **FIT)
        model.optimizer.learning_rate = before
        return history

    def dist_fit(model, x, y, rate, **given):
        given |= {"batch": "global", "lr_scaling": rate / 0.1}
        return keras_dist.dist_fit(model, x, y, batch_size=24, **given, **FIT)

    oracle, expected = train(fit_plainly, 0.2, 0.3)
    model, losses = train(dist_fit, 0.2, 0.3)
    assert losses == pytest.approx(expected, abs=2e-6)
    assert largest_difference(model, oracle) < 1e-5
    assert_equal_to_the_bit(model)
    assert type(model) is keras.Sequential


@pytest.mark.several_ranks
def test_an_optimizer_that_does_not_average_is_found(rows, make_model):
    """The silent failure of Horovod's own layer on Keras 3 is an error here."""
    model, callbacks = make_model(), [keras_dist.BroadcastVariables()]

    def fit():
        model.fit(*rows, verbose=0, callbacks=callbacks)

    raises_everywhere(ValueError, fit, "does not average")


def test_a_custom_loop_averages(world, rows, make_model):
    """`DistributedOptimizer` in a hand-written loop, traced and eager."""
    x, y = (array[:96] for array in rows)
    loss = keras.losses.BinaryCrossentropy()

    def train(optimizer, x, y, steps, wrap):
        model = make_model(optimizer)
        optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            update(tape, value, optimizer, model)

        run = wrap(step)
        for part in range(steps):
            batch = slice(part * len(x) // steps, (part + 1) * len(x) // steps)
            run(tf.constant(x[batch]), tf.constant(y[batch, None]))
        return model

    for wrap in (tf.function, lambda step: step):
        oracle = train(keras.optimizers.Adam(), x, y, 4, lambda step: step)
        optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam())
        model = train(optimizer, *shard((x, y), world), 4, wrap)
        assert largest_difference(model, oracle) < 1e-5
        assert_equal_to_the_bit(model)


def test_all_ranks_stop_at_the_same_epoch(world, rows, make_model):
    """After `patience` epochs in a row at or above the target."""
    values = [0.4, 0.6, 0.4, 0.6, 0.7, 0.8]

    class Scripted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            # Ranks with different values still make one decision.
            logs["val_accuracy"] = values[epoch] + 0.01 * keras_dist.rank()

    given = {"batch_size": 40, "epochs": 6, "verbose": 0, "validation_data": rows}
    given["callbacks"] = [keras_dist.StopAtAccuracy(0.6, 2), Scripted()]
    history = keras_dist.dist_fit(make_model(), *rows, **given)
    assert len(history.epoch) == 5


def test_target_accuracy_stops(world, rows, make_model, capsys):
    """`target_accuracy` of `dist_fit` adds the callback; one rank prints a line."""
    given = {"batch_size": 8, "epochs": 50, "verbose": 2, "validation_data": rows}
    history = keras_dist.dist_fit(make_model(), *rows, target_accuracy=0.9, **given)
    reached = history.history["val_accuracy"]
    assert reached[-1] >= 0.9 and all(value < 0.9 for value in reached[:-1])
    is_printed = "stopped after epoch" in capsys.readouterr().out
    assert keras_dist.gather(is_printed) == [rank == 0 for rank in range(world.size)]


def test_an_unknown_metric_is_an_error_on_all_ranks(rows, make_model):
    """The message lists the metrics in the logs."""
    for monitor, data in (("val_acc", rows), ("accurate", None)):
        call = {"validation_data": data, "verbose": 0, "epochs": 2}
        call["callbacks"] = [keras_dist.StopAtAccuracy(0.6, monitor=monitor)]
        raises_everywhere(
            ValueError,
            lambda call=call: keras_dist.dist_fit(make_model(), *rows, **call),
            repr(monitor),
            "'accuracy'",
        )


def test_a_training_without_an_evaluation_ends_with_a_warning(world, rows, make_model):
    """None was due, or there is no data for one: the history is returned."""
    stop = keras_dist.StopAtAccuracy(0.9)
    for given in (
        {"validation_data": rows, "target_accuracy": 0.9, "validation_freq": 5},
        {"callbacks": [stop]},
    ):
        with warned("validation_freq") as texts:
            history = keras_dist.dist_fit(
                make_model(), *rows, epochs=2, verbose=0, **given
            )
        assert history.epoch == [0, 1] and len(texts) == (world.rank == 0)


@pytest.mark.several_ranks
def test_a_stop_at_an_epochs_end_is_read_by_later_callbacks(rows, make_model):
    """One after `EarlyStopping` may save the model then; one before reads False."""

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.stop_training)

    seen, stop = [], {"monitor": "loss", "patience": 1, "min_delta": 1e9}
    for fit in keras.Model.fit, keras_dist.dist_fit:
        callbacks = [Reads(), keras.callbacks.EarlyStopping(**stop), Reads()]
        fit(make_model(), *rows, epochs=5, verbose=0, callbacks=callbacks)
    assert seen == [False, False, False, True] * 2


def test_lines_beside_the_bar_can_be_turned_off(rows, make_model, capsys):
    """By the level of the logger `keras_dist`."""
    logger = logging.getLogger("keras_dist")
    logger.setLevel(logging.WARNING)
    stop = keras_dist.StopAtAccuracy(0.0, monitor="accuracy")
    keras_dist.dist_fit(make_model(), *rows, verbose=2, callbacks=[stop])
    logger.setLevel(logging.INFO)
    assert "stopped after epoch 1" not in capsys.readouterr().out


@pytest.mark.several_ranks
def test_a_backup_of_a_finished_training_may_be_between_updates(world, rows, folder):
    """Only the first rank holds its accumulated gradients, and nobody waits."""

    def fit():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        model.compile(keras_dist.DistributedOptimizer(plain), "mse")
        backup = keras.callbacks.BackupAndRestore(
            f"{folder}/b", delete_checkpoint=False
        )
        ours = [keras_dist.AverageStatistics(), keras_dist.BroadcastVariables()]
        callbacks = [*[backup] * (world.rank == 0), *ours]
        x, y = shard(rows, world)
        options = {"epochs": 1, "batch_size": 8, "verbose": 0, "callbacks": callbacks}
        return model, model.fit(x[:32], y[:32], **options)

    expected, _ = fit()
    again, history = fit()
    assert history.epoch == []
    assert_same_bits(again.get_weights(), expected.get_weights())


def test_a_backup_restores_all_ranks(world, rows, make_model, tmp_path):
    """The first rank restores weights and epoch, and broadcasts them."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    options = {"batch_size": 24, "epochs": 3, "shuffle": False, "verbose": 0}

    def fit(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(
            str(tmp_path / "backup"), delete_checkpoint=False
        )
        given = {"callbacks": [backup, *callbacks]} | options
        return keras_dist.dist_fit(model, *rows, **given)

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), Interrupt())
    model = make_model(seed=20 + world.rank)
    assert fit(model).epoch == [2]
    whole = make_model()
    keras_dist.dist_fit(whole, *rows, **options)
    again = make_model(seed=40 + world.rank)
    assert fit(again).epoch == []  # it was finished
    for trained in (model, again):
        assert_equal_to_the_bit(trained)
        assert_same_bits(state_of(trained), state_of(whole))
