"""Which rows each rank reads: every small case, against one process.

A resumed training reads the rows that are left, on any number of ranks.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_dist.data.arrays import Arrays, read_rows
from keras_dist.data.batch_rows import own_span, take_off
from keras_dist.data.division import Division, ReadContext
from keras_dist.data.pipeline import as_untuned

CASES = list(itertools.product(range(1, 5), range(1, 6), range(1, 40)))


NUM_ROWS = 23


def divide(size, batch_size, steps=None, *, rows=NUM_ROWS, at=None, facts=None):
    """Divide the rows of arrays among some ranks, in batches of each.

    Args:
        size: How many ranks there are.
        batch_size: Rows of a batch of one of them.
        steps: Of an epoch, which is a pass by default.
        rows: How many there are.
        at: A position of another `Division` to begin at.
        facts: Of that one.
    """
    context = ReadContext(0, size, position=at, facts_before=facts)
    per_step = size * batch_size
    return Division.of(context, rows, per_step=per_step, unit="rows", steps=steps)


def test_ranks_read_the_batches_of_one_process():
    """One after the other, their parts are one global batch, and about as long."""
    for size, batch_size, num_rows in CASES:
        division = divide(size, batch_size, rows=num_rows)
        read = []
        for step in range(division.steps):
            number, *span = division.span(step)
            assert number == 0
            rows = range(*span)
            parts = [own_span(len(rows), rank, size) for rank in range(size)]
            lengths = [end - begin for begin, end in parts]
            assert 0 < lengths[0] <= batch_size and lengths[0] - lengths[-1] <= 1
            read += [row for part in parts for row in rows[slice(*part)]]
        assert read == list(range(num_rows))


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_the_data_set_yields_the_rows_of_the_schedule(shuffle):
    """Each row once a pass, in an order that does not depend on the size."""
    batches = {}
    data = Arrays(np.arange(NUM_ROWS), np.arange(NUM_ROWS) * 2.0)
    for size, batch_size in ((1, 6), (2, 3), (3, 2)):
        passes = []
        readers = [
            reader(data, batch_size, rank, size, shuffle, None) for rank in range(size)
        ]
        for number in range(2):
            order = []
            batches_of_steps = zip(*(read(number) for read in readers), strict=True)
            for step, of_ranks in enumerate(batches_of_steps):
                global_batch = []
                parts = list(map(take_off, of_ranks))
                length = int(parts[0][1].total)
                for (x, y), (rows, begin, total) in parts:
                    assert begin == len(global_batch) and len(x) == max(rows, 1)
                    assert total == length
                    global_batch += x.numpy().tolist()[: int(rows)]
                    assert (y.numpy() == 2 * x.numpy()).all()
                    assert y.dtype == tf.float32
                assert length == len(global_batch) <= size * batch_size
                order += global_batch
                if shuffle == "batch":
                    rows = range(step * 6, step * 6 + len(global_batch))
                    assert sorted(global_batch) == list(rows)
            assert sorted(order) == list(range(NUM_ROWS))
            passes.append(order)
        batches[size] = passes
        assert (passes[0] == passes[1]) == (shuffle is False)
    assert batches[1] == batches[2] == batches[3]


def reader(data, batch_size, rank, size, shuffle, steps):
    """A function that reads the batches of one rank in an epoch."""
    division = divide(size, batch_size, steps, rows=data.num_rows)
    epoch = tf.Variable(0, dtype=tf.int64)
    given = {"rank": rank, "shuffle": shuffle, "seed": 5}
    # Tuned, TensorFlow sleeps at the end of each pass.
    dataset = as_untuned(read_rows(data, division, epoch, **given))
    assert int(dataset.cardinality()) == division.steps

    def read(number):
        epoch.assign(number)
        return list(dataset)

    return read


def test_an_epoch_begins_where_the_epoch_before_it_ended():
    """With any number of steps: the batches of all epochs are the same sequence."""
    data = Arrays(np.arange(11))

    def epochs(steps, count):
        read = reader(data, 2, 1, 2, True, steps)
        batches = [take_off(data) for n in range(count) for data in read(n)]
        return [batch.numpy().tolist() for batch, _ in batches]

    whole = epochs(None, 8)
    for steps in range(1, 8):
        assert epochs(steps, 3) == whole[: 3 * steps]


def test_arrays_of_different_lengths_are_refused():
    """The error names their shapes."""
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4,\)"):
        Arrays(np.zeros((3, 2)), np.zeros(4))


SIZES = ((1, 6), (2, 3), (3, 2), (2, 5))


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


@pytest.mark.parametrize("steps", [None, 2, 3, 6])
def test_a_resumed_training_reads_the_same_batches_on_as_many_ranks(steps):
    """Resumed at every step of an epoch, and again at every step of the rest."""
    for size, batch_size in SIZES:
        sizes = size, batch_size, steps
        whole = divide(*sizes)
        expected = [positions_of(whole, epoch) for epoch in range(4)]
        for done in range(whole.steps):
            rest = divide(*sizes, at=whole.position(1, done))
            assert positions_of(rest, 1) == expected[1][done:]
            assert [positions_of(rest, 2), positions_of(rest, 3)] == expected[2:]
            for more in range(whole.steps - done):
                again = divide(*sizes, at=rest.position(1, more))
                assert positions_of(again, 1) == expected[1][done + more :]
                assert [positions_of(again, 2), positions_of(again, 3)] == expected[2:]


def test_another_number_of_ranks_reads_each_row_that_is_left_once():
    """In the resumed pass and in later ones."""
    for before, after in itertools.permutations(SIZES, 2):
        whole = divide(*before)
        first = positions_of(whole, 1)
        for done in range(1, whole.steps):
            rest = divide(*after, at=whole.position(1, done), facts=whole.facts())
            own = positions_of(rest, 1)
            read = sum((part for _, part in first[:done] + own), [])
            assert {number for number, _ in own} <= {1}
            assert read == list(range(NUM_ROWS))
            following = positions_of(rest, 2)
            read = sum((part for _, part in following), [])
            assert {number for number, _ in following} == {2}
            assert read == list(range(NUM_ROWS))


def test_resuming_within_an_epoch_of_other_data_is_an_error():
    """Between epochs the number of rows may change."""
    whole = divide(2, 3)
    with pytest.raises(ValueError, match="23 rows"):
        divide(2, 3, rows=24, at=whole.position(1, 2), facts=whole.facts())
    position = whole.position(1, whole.steps)
    assert (position.epoch, position.step, position.items) == (2, 0, 2 * NUM_ROWS)
