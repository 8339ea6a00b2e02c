"""How many collectives there are, and how many bytes are sent."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.claims import largest_difference
from harness.models import SUBJECTS, make_compiled

import keras_dist
from keras_dist.comm import transport
from keras_dist.optimizer import reduce

pytestmark = pytest.mark.several_ranks


@pytest.fixture
def sent(monkeypatch):
    """Counts collectives of gradients, and their bytes, of eager steps."""
    calls, moved = Counter(), Counter()
    plain = transport.run

    def counted(verb, link, tensor, name, **options):
        if name.startswith(("keras_dist.gradients", "keras_dist.accumulated")):
            calls[verb] += 1
            moved[verb] += tensor.dtype.size * int(np.prod(tensor.shape))
        return plain(verb, link, tensor, name, **options)

    monkeypatch.setattr(transport, "run", counted)
    return calls, moved


def fit(name, optimizer, rows=48, **options):
    """Six steps of a model, on any number of ranks."""
    return fit_made(SUBJECTS[name].make, name, optimizer, rows, **options)


def fit_made(make, name, optimizer, rows=48, **options):
    """The same, of what `make` makes."""
    subject = SUBJECTS[name]
    model = make_compiled(make, optimizer, subject.loss, run_eagerly=True)
    x, y = subject.rows(rows * keras_dist.size())
    keras_dist.dist_fit(model, x, y, batch_size=8, epochs=1, verbose=0, **options)
    return model


def test_one_collective_an_update(sent):
    """All gradients of a dtype are packed, also if batches are accumulated."""
    calls, _ = sent
    fit("perceptron", "adam")
    assert calls == {"allreduce": 6}
    calls.clear()
    fit("perceptron", keras.optimizers.Adam(gradient_accumulation_steps=3))
    assert calls == {"allreduce": 2}


def test_large_gradients_are_sent_alone(sent, monkeypatch):
    """And the model is the same."""
    calls, _ = sent
    packed = fit("perceptron", keras.optimizers.SGD(0.1))
    calls.clear()
    monkeypatch.setattr("keras_dist.comm.collectives._LARGE", 4)
    alone = fit("perceptron", keras.optimizers.SGD(0.1))
    # The weight, and the steps with their requests, are alone, too.
    assert calls == {"allreduce": 6 * (len(alone.weights) + 2)}
    assert largest_difference(alone, packed) < 1e-6


def test_the_loss_is_weighted_if_only_keras_code_follows_it(monkeypatch):
    """Not if the user's own code runs between the loss and the average."""
    weights, plain = [], reduce.exchange

    def recorded(own, weight, *options, **names):
        weights.append(weight)
        return plain(own, weight, *options, **names)

    class Own(keras.optimizers.SGD):  # gets the average
        def apply_gradients(self, *args, **kwargs):
            return super().apply_gradients(*args, **kwargs)

    class Steps(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    def make_own():
        return Steps(SUBJECTS["perceptron"].make().layers)

    monkeypatch.setattr(reduce, "exchange", recorded)
    models = []
    for make, kind, is_weighed in (
        (SUBJECTS["perceptron"].make, keras.optimizers.SGD, True),
        (SUBJECTS["perceptron"].make, Own, True),
        (make_own, keras.optimizers.SGD, False),
    ):
        weights.clear()
        models.append(fit_made(make, "perceptron", kind(0.1)))
        assert [weight is None for weight in weights] == [is_weighed] * 6
        assert largest_difference(models[0], models[-1]) < 1e-6


def test_an_embedding_sends_the_rows_that_were_read(sent):
    """Or all of its table, if that is less."""
    calls, moved = sent
    fit("large embedding", "sgd")
    assert calls == {"allreduce": 6, "allgather": 12}
    table = 500 * 3 * 4
    assert moved["allgather"] < 6 * table / 4
    # The dense layer, the weight; each rank's step and request, and its rows.
    assert moved["allreduce"] == 6 * 4 * (13 + 1 + 2 * keras_dist.size())
    for counter in sent:
        counter.clear()
    fit("tiny embedding", "sgd")
    assert calls == {"allreduce": 12}


def test_repeated_rows_are_merged_before_they_are_sent(sent):
    """A batch reads 32 words, but each of at most ten only is sent once."""
    _, moved = sent
    fit("large embedding", "sgd", rows=8)
    assert moved["allgather"] <= 10 * (3 * 4 + 4)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_compressed_gradients_are_sent_in_two_bytes(sent, kind):
    """Two collectives of half the bytes; and a small one of what goes with them."""
    calls, moved = sent
    sgd = keras.optimizers.SGD()
    model = fit("perceptron", keras_dist.DistributedOptimizer(sgd, compression=kind))
    numbers = sum(weight.numpy().size for weight in model.weights)
    size = keras_dist.size()
    padded = -(-numbers // size) * size
    assert calls == {"allreduce": 6, "alltoall": 6, "allgather": 6}
    assert moved["alltoall"] == 6 * 2 * padded
    assert moved["allgather"] == 6 * 2 * padded // size
    # The weight; each rank's step and request, and its largest number.
    assert moved["allreduce"] == 6 * 4 * (1 + 2 * size)


@pytest.mark.three_ranks
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 1e6, 1e30])
def test_compression_neither_overflows_nor_vanishes(world, kind, magnitude):
    """Gradients of any size come out with the digits of their format."""
    own = np.random.default_rng(world.rank).normal(size=41).astype("float32")
    by_rank = np.stack(keras_dist.gather(own)).astype("float64") * magnitude
    weights = np.arange(1.0, world.size + 1)
    (vector,) = reduce.exchange(
        [tf.constant(own * np.float32(magnitude))],
        weights[world.rank],
        reduce.Averaging(compression=kind),
        name="keras_dist.tested",
    )
    expected = (weights[:, None] * by_rank).sum(axis=0) / weights.sum()
    digits = 2.0**-10 if kind == "fp16" else 2.0**-7
    assert np.abs(vector.numpy() - expected).max() < digits * np.abs(by_rank).max()


@pytest.mark.three_ranks
def test_an_inf_on_one_rank_is_an_inf_on_all(world):
    """So that all ranks halve the loss scale of mixed precision at the same step."""
    own = np.ones(8, "float32")
    own[3] = np.inf if world.rank == world.size - 1 else 1.0
    options = reduce.Averaging(compression="fp16")
    (mean,) = reduce.exchange([tf.constant(own)], 1, options, name="keras_dist.tested")
    assert not np.isfinite(mean.numpy()[3])
    assert (np.delete(mean.numpy(), 3) == 1).all()
