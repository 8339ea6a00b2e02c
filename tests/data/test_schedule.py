"""A resumed training reads the rows that are left, on any number of ranks."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data.arrays import Arrays, RowOrder
from keras_dist.data.division import Division, ShardSpec

NUM_ROWS = 23
SIZES = ((1, 6), (2, 3), (3, 2), (2, 5))


def divide(position, total, per_step, size, unit, steps=None, facts_before=None):
    """The `Division` of some ranks, from a position or the beginning."""
    spec = ShardSpec(0, size, position=position, facts_before=facts_before)
    return Division.of(spec, total, per_step=per_step, unit=unit, steps=steps)


def sized(size, batch_size, steps=None):
    """Arguments of `divide`; an epoch is a pass by default."""
    sizes = {"total": NUM_ROWS, "per_step": batch_size * size, "size": size}
    return sizes | {"unit": "rows", "steps": steps}


def positions_of(schedule, epoch):
    """Pass and rows of each global batch of an epoch, by arithmetic."""
    batches = []
    for step in range(schedule.count_steps(epoch)):
        position = schedule.position(epoch, step)
        done = step + schedule.steps - schedule.count_steps(epoch)
        assert (position.epoch, position.step) == (epoch, done)
        number, begin, end = schedule.span(schedule.find_first_step(epoch) + step)
        number += schedule.first_pass
        assert divmod(position.items, NUM_ROWS) == (number, begin)
        batches.append((number, list(range(begin, end))))
    return batches


def resumed(whole, done, after):
    """Epoch 1, after `done` steps, on other ranks."""
    facts = whole.facts()
    return divide(whole.position(1, done), **sized(*after), facts_before=facts)


@pytest.mark.parametrize("steps", [None, 2, 3, 6])
def test_a_resumed_training_reads_the_same_batches_on_as_many_ranks(steps):
    """Resumed at every step of an epoch, and again at every step of the rest."""
    for size, batch_size in SIZES:
        sizes = sized(size, batch_size, steps)
        whole = divide(None, **sizes)
        expected = [positions_of(whole, epoch) for epoch in range(4)]
        for done in range(whole.steps):
            rest = divide(whole.position(1, done), **sizes)
            assert positions_of(rest, 1) == expected[1][done:]
            assert [positions_of(rest, 2), positions_of(rest, 3)] == expected[2:]
            for more in range(whole.steps - done):
                again = divide(rest.position(1, more), **sizes)
                assert positions_of(again, 1) == expected[1][done + more :]
                assert [positions_of(again, 2), positions_of(again, 3)] == expected[2:]


def test_another_number_of_ranks_reads_each_row_that_is_left_once():
    """In the resumed pass and in later ones."""
    for before, after in itertools.permutations(SIZES, 2):
        whole = divide(None, **sized(*before))
        first = positions_of(whole, 1)
        for done in range(1, whole.steps):
            rest = resumed(whole, done, after)
            own = positions_of(rest, 1)
            read = sum((part for _, part in first[:done] + own), [])
            assert {number for number, _ in own} <= {1}
            assert read == list(range(NUM_ROWS))
            following = positions_of(rest, 2)
            read = sum((part for _, part in following), [])
            assert {number for number, _ in following} == {2}
            assert read == list(range(NUM_ROWS))


def test_the_rows_of_each_step_are_known_beforehand():
    """The rows of all ranks at each step, counted from the beginning of epoch 0."""
    for before, after in itertools.product(SIZES[:3], repeat=2):
        whole = divide(None, **sized(*before))
        for done in (0, 1, whole.steps - 1):
            rest = resumed(whole, done, after)
            for epoch in (rest.epoch, rest.epoch + 1):
                positions = positions_of(rest, epoch)
                steps = rest.find_first_step(epoch) + np.arange(len(positions))
                _, begins, ends = rest.span(tf.constant(steps, tf.int64))
                counts = (ends - begins).numpy().tolist()
                assert counts == [len(part) for _, part in positions]


@pytest.mark.parametrize(
    ("shuffle", "steps"), [(False, None), (True, 5), ("batch", None)]
)
def test_the_data_set_yields_the_rows_of_the_schedule(shuffle, steps):
    """From the middle of an epoch, on as many ranks and on more."""
    data = Arrays.of(np.arange(NUM_ROWS))
    orders = {}
    # Inside batches, another size has other orders.
    for after in ((2, 3, steps), (3, 3, steps))[: 1 if shuffle == "batch" else 2]:
        whole = divide(None, **sized(2, 3, steps))
        for schedule in (
            whole,
            resumed(whole, 2, after),
        ):
            for epoch, batches in global_batches(data, schedule, shuffle, (1, 2)):
                positions = positions_of(schedule, epoch)
                for (number, part), batch in zip(positions, batches, strict=True):
                    if shuffle == "batch":
                        assert sorted(batch) == part
                    for position, row in zip(part, batch, strict=True):
                        assert orders.setdefault((number, position), row) == row


def global_batches(data, schedule, shuffle, epochs):
    """The global batches of each epoch, joined from the batches of all ranks."""
    variable = tf.Variable(0, dtype=tf.int64)
    of_all = []
    for rank in range(schedule.size):
        order = RowOrder(schedule, rank, shuffle=shuffle, seed=5, is_marked=True)
        of_all.append(order.dataset(data, variable))
        assert int(of_all[-1].cardinality()) == schedule.steps
    for epoch in epochs:
        variable.assign(epoch)
        batches_of_ranks = [
            [x.numpy().tolist() * int(mark[0]) for x, mark in dataset]
            for dataset in of_all
        ]
        batches = []
        for of_ranks in zip(*batches_of_ranks, strict=True):
            global_batch = [None] * sum(map(len, of_ranks))
            for rank, batch in enumerate(of_ranks):
                assert len(batch) <= schedule.global_batch // schedule.size
                global_batch[rank :: schedule.size] = batch
            batches.append(global_batch)
        yield epoch, batches


def test_resuming_within_an_epoch_of_other_data_is_an_error():
    """Between epochs the number of rows may change."""
    sizes = sized(2, 3)
    whole = divide(None, **sizes)
    other = sizes | {"total": 24, "facts_before": whole.facts()}
    with pytest.raises(ValueError, match="23 rows"):
        divide(whole.position(1, 2), **other)
    position = whole.position(1, whole.steps)
    assert (position.epoch, position.step, position.items) == (2, 0, 2 * NUM_ROWS)
