"""Data sets, sequences and generators that are the same on all ranks are sharded."""

import contextlib
import re
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import data_kinds
from harness.claims import (
    Ended,
    assert_equal_to_the_bit,
    assert_equals_one_process,
    gather_errors,
    largest_difference,
    raises_everywhere,
    shortened,
    slow_on_three,
)
from harness.models import make_compiled, perceptron

import keras_dist

pytestmark = pytest.mark.several_ranks
BATCH = 5

# That data has ended is no warning, nor are rows that are left out.
never_runs_out = pytest.mark.filterwarnings("error:Your input ran out of data")
fit = partial(keras_dist.dist_fit, verbose=0)


class Sequence(data_kinds.Sequence):
    """Batches by their number; notes which were made, and the ends of epochs."""

    def __init__(self, x, y, **options):
        super().__init__(x, y, [BATCH], **options)
        self.ended, self.made = 0, set()

    def __getitem__(self, index):
        self.made.add(index)
        return super().__getitem__(index)

    def on_epoch_end(self):
        self.ended += 1


def dataset_of(x, y):
    """A data set of known length."""
    return data_kinds.BATCHES["batched"](x, y, BATCH)


def unknown(x, y):
    """A data set of unknown length."""
    return data_kinds.BATCHES["filtered batches"](x, y, BATCH)


@never_runs_out
@slow_on_three
def test_every_kind_of_batches_is_sharded(world, rows, make_model, fit_plainly):
    """Weights and metrics of one process with the global batch, tail and all."""
    x, y = (array[:96] for array in rows)  # 20 batches, the last one of one row
    validation = x[:33], y[:33]
    how = {"batch_size": BATCH * world.size, "validation_data": validation}
    oracle = fit_plainly(keras.optimizers.SGD(0.1), x, y, epochs=2, **how)
    workers = {"workers": 2, "use_multiprocessing": True}
    data = {
        "known": (dataset_of(x, y), dataset_of(*validation)),
        "unknown": (unknown(x, y), unknown(*validation)),
        "sequence": (Sequence(x, y), Sequence(*validation)),
        "workers": (Sequence(x, y, **workers), Sequence(*validation, **workers)),
    }
    for kind, (training, held_out) in data.items():
        model = make_model(keras.optimizers.SGD(0.1))
        how = {"epochs": 2, "shuffle": False, "lr_scaling": "none"}
        history = fit(model, training, validation_data=held_out, **how).history
        assert largest_difference(model, oracle) < 1e-5, kind
        assert_equal_to_the_bit(model)
        for name in ("accuracy", "val_loss", "val_accuracy"):
            expected = pytest.approx(oracle.history[name], abs=1e-6)
            assert history[name] == expected, (kind, name)
        if isinstance(training, Sequence):
            assert training.ended >= 2
            # A rank makes no batch of another rank, but for looks at the first ones.
            assert training.made - set(range(world.size)) <= {
                *range(20)[world.rank :: world.size]
            } | {19}


def test_the_plan_says_how_batches_are_sharded(world, rows, make_model, capsys):
    """Sharded, or used as already split if the ranks' batches differ."""
    x, y = rows
    own = slice(world.rank, None, world.size)
    steps = f"3 → {-(-3 // world.size)} per epoch"
    for data, texts in (
        (dataset_of(x, y), ("sharded by batch, round robin", steps)),
        (dataset_of(x[own], y[own]), ("already split",)),
    ):
        keras_dist.dist_fit(make_model(), data.take(3), warmup_epochs=1, verbose=2)
        printed = capsys.readouterr().out
        assert all((text in printed) == (world.rank == 0) for text in texts)


@never_runs_out
def test_data_that_cannot_be_sharded_is_an_error(world, rows, make_model):
    """Changed differently by `on_epoch_end`, too short, of different kinds."""
    x, y = rows

    class Shuffled(Sequence):
        def on_epoch_end(self):
            order = np.random.default_rng().permutation(len(x))
            self.batches = Sequence(x[order], y[order]).batches

    class Augmented(Shuffled):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + np.random.default_rng().normal(size=x.shape), y

    few = x[: 50 * world.rank], y[: 50 * world.rank]
    for data, text in (
        (Shuffled(x, y), "After `on_epoch_end`"),
        (Augmented(x, y), "After `on_epoch_end`"),  # as its labels tell
        (dataset_of(x[:0], y[:0]), "There is no data to train on"),
        (Sequence(x[:0], y[:0]), "There is no data to train on"),
        (data_kinds.generated(*few, BATCH), "There is no data"),
        (((tf.sparse.from_dense(x), y) for _ in x), "a batch with SparseTensor"),
        ((((x, None), y) for _ in x), "a batch with NoneType"),
        (
            dataset_of(x, y) if world.rank else Sequence(x, y),
            "the kind of the training",
        ),
    ):
        call = partial(fit, make_model(), data, epochs=2)
        raises_everywhere(ValueError, call, text)
    call = partial(fit, make_model(), x, y, validation_data=dataset_of(x, y).take(0))
    raises_everywhere(ValueError, call, "nothing to validate on")


@never_runs_out
def test_random_batches_are_sharded_by_index(world, rows, make_model, capsys):
    """Augmented at random: the same rows. Shuffled without a seed: the plan says so."""
    x, y = rows

    def noise(batch):
        return batch + np.random.default_rng().normal(size=batch.shape, scale=1e-3)

    def augment(batch, labels):
        noisy = tf.numpy_function(noise, [tf.cast(batch, tf.float64)], tf.float64)
        return tf.ensure_shape(noisy, batch.shape), labels

    augmented = dataset_of(x, y).map(augment)
    tf.random.set_seed(world.rank)  # and no `seed` below
    shuffled = dataset_of(x, y).shuffle(21)
    for data, warns in ((augmented, False), (shuffled, True)):
        capsys.readouterr()
        model = make_model()
        keras_dist.dist_fit(model, data, epochs=2, verbose=2)
        printed = " ".join(re.findall(r"[^│╭╰\s]+", capsys.readouterr().out))
        is_first = world.rank == 0
        assert ("each rank takes its index" in printed) == is_first
        assert ("shuffled without a seed" in printed) == (is_first and warns)
    call = partial(fit, make_model(), x, y, validation_data=shuffled)
    raises_everywhere(ValueError, call, "shuffled without a seed")


@never_runs_out
@pytest.mark.parametrize("has_labels", shortened([True, False], {True}))
def test_a_sequence_that_augments_may_shuffle_at_the_end_of_an_epoch(rows, has_labels):
    """What is random from the beginning says nothing about the order."""
    x, y = rows

    class Augmented(data_kinds.Listed):
        def __getitem__(self, index):
            x, y = self.batches[index]
            noise = np.random.default_rng().normal(size=(2, *y.shape)) * 1e-9
            return x + noise[0][:, None], y + noise[1] * (not has_labels)

        def on_epoch_end(self):
            np.random.shuffle(self.batches)

    def make_data(size):
        keras.utils.set_random_seed(1)
        return Augmented(data_kinds.Sequence(x, y, [size]).batches)

    def make():
        return make_compiled(perceptron, "sgd", "mse", run_eagerly=True)

    assert_equals_one_process(make, make_data, 10, batch="global", epochs=3)


@never_runs_out
@slow_on_three
def test_an_error_in_one_ranks_data_is_raised_on_all(world, rows, make_model):
    """In training, `evaluate` and validation, from generators and from sequences.

    Its own error on that rank; on the others, one that names the rank.
    """
    x, y = rows

    class Broken(Sequence):
        def __getitem__(self, index):
            if world.rank == 1:
                raise KeyError("tea")
            return super().__getitem__(index)

    def broken():
        for number, batch in enumerate(data_kinds.generated(x, y, BATCH)):
            if number >= 4 and world.rank == 1:
                raise KeyError("tea")
            yield batch

    expected = [("RankError", "On rank 1: KeyError: 'tea'")] * world.size
    expected[1] = ("KeyError", "'tea'")
    model = make_model()
    distributed = keras_dist.DistributedModel(model, shard="none")
    calls = [partial(fit, model, broken())]
    for data in (broken, lambda: Broken(x, y)):
        validated = {"batch_size": 30, "validation_data": data(), "verbose": 0}
        calls += [
            partial(distributed.evaluate, data(), verbose=0),
            partial(distributed.fit, x, y, **validated),
        ]
    for call in calls:
        assert gather_errors(Exception, call) == expected
    found = distributed.evaluate(x, y, verbose=0)  # the ranks are still in step
    assert found == keras_dist.broadcast(found)


@pytest.mark.three_ranks
def test_ranks_that_run_dry_stop_at_the_same_step(world, rows, make_model):
    """When no rank has a batch: all rows are trained on, as by one process."""
    x, y = rows
    parts = [
        (x[: BATCH * (4 + r)] + r, y[: BATCH * (4 + r)]) for r in range(world.size)
    ]
    steps = 4 + world.size - 1

    def plain_data(_):
        spans = [slice(step * BATCH, (step + 1) * BATCH) for step in range(steps)]
        batches = [[(a[span], b[span]) for a, b in parts] for span in spans]
        batches = [map(np.concatenate, zip(*own, strict=True)) for own in batches]
        return data_kinds.Listed([*map(tuple, batches)])

    model, *_ = assert_equals_one_process(
        make_model,
        lambda _: unknown(*parts[world.rank]),
        plain_data=plain_data,
        epochs=2,
    )
    assert int(model.optimizer.iterations) == 2 * steps


@slow_on_three
def test_each_update_is_counted_once(world, rows, folder):
    """Keras begins a step more where it cannot know the number of batches.

    As at the end of an epoch in whose middle a training is resumed.
    """
    x, y = (array[: BATCH * (2 * world.size + 1) - 1] for array in rows)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def end(batch, logs):
        if batch == 1:  # with a checkpoint of the first
            raise Ended

    def add_up(y, p):
        return keras.ops.sum((y - p) ** 2)

    def fit(steps, loss, *callbacks, **options):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", loss, steps_per_execution=steps, jit_compile=False)
        given = {"epochs": 3, "shuffle": False, "verbose": 0, **options}
        with contextlib.suppress(Ended):
            keras_dist.dist_fit(model, data, callbacks=list(callbacks), **given)
        return int(model.optimizer.iterations)

    assert fit(3, "mse") == 3 * 3
    options = {"resume": str(folder), "save_steps": 1}
    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    assert fit(1, add_up, ends, **options) == 2
    assert fit(1, add_up, **options) == 3 * 3


def test_a_file_larger_than_memory_is_never_copied(world, rows, tmp_path, make_model):
    """64 GiB that take no room on disk; and rows from a file equal memory's."""
    huge = np.memmap(tmp_path / "huge", "float32", "w+", shape=(2**20, 2**14))
    targets = np.memmap(tmp_path / "targets", "float32", "w+", shape=(2**20,))
    model = keras.Sequential([keras.Input((2**14,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    given = {"batch_size": 8, "steps_per_epoch": 2 * world.size}
    given |= {"validation_data": (huge, targets), "validation_steps": world.size}
    fit(model, huge, targets, **given)
    assert int(model.optimizer.iterations) == 2
    x, y = rows
    on_disk = np.memmap(tmp_path / "x", "float64", "w+", shape=x.shape)
    on_disk[:] = x
    models = []
    for data in (x, on_disk):
        model = make_model()
        fit(model, data, y, batch_size=8, validation_data=(data, y))
        models.append(model)
    assert largest_difference(*models) == 0
