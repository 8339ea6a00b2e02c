"""Every row is counted once: random data of all kinds, all ranks in one process.

ROWS_FIRST=0 ROWS_COUNT=200 tries others, and more.
"""

import os
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_kinds import (
    ARRAYS,
    BATCHES,
    KINDS,
    SEQUENCES,
    Case,
    counted,
    counted_batches,
    draw,
    ids_of_batches,
)

from keras_dist.data.adapters import training_feed, validation_feed
from keras_dist.data.division import ShardSpec
from keras_dist.data.source import Source

FIRST = int(os.environ.get("ROWS_FIRST", "0"))
COUNT = int(os.environ.get("ROWS_COUNT", "12"))

# Cases in one test of pytest.
CHUNK = 20

# They are read without TensorFlow: many cases a second.
QUICK = ["arrays", *SEQUENCES]


def spec_of(case: Case, rank: int, name: str) -> ShardSpec:
    """The ranks, as `setup.sources.compare` describes them."""
    return ShardSpec(
        rank,
        case.size,
        seed=3,
        keeps_position=case.keeps_position and name == "training",
    )


def training(case: Case, rank: int) -> Any:
    """The feed of one rank."""
    data = case.data()
    x, y = data if case.kind in ARRAYS else (source_of(data, case.size), None)
    return training_feed(
        x,
        y,
        None,
        batch_size=case.batch_size,
        shuffle=case.shuffle,
        steps_per_epoch=case.steps if case.kind in ARRAYS else None,
        steps_rule="divide",
        spec=spec_of(case, rank, "training"),
    )


def validation(case: Case, rank: int, steps: int | None = None) -> Any:
    """The same for an evaluation."""
    data = case.data()
    return validation_feed(
        data if case.kind in ARRAYS else source_of(data, case.size),
        batch_size=case.batch_size,
        steps=steps,
        steps_rule="divide",
        spec=spec_of(case, rank, "validation"),
    )


def source_of(data, size):
    """What `dist_fit` makes of it, after its first batches were compared."""
    if size == 1:
        return data
    source = Source(data, is_same=True)
    source.fingerprint(size)
    return source


def read(feed: Any, batch_size: int) -> list[list[int]]:
    """The rows that count in an epoch, batch by batch."""
    x, y = feed.arguments["x"], feed.arguments["y"]
    if y is None and feed.is_marked:
        x = counted_batches(feed)
    if y is None:
        return ids_of_batches(x)
    ids = np.asarray(y).astype(int).tolist()
    assert np.asarray(x).astype(int).tolist() == ids
    batches = [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)]
    return batches[: feed.keras_steps]


def check_evaluation(case: Case, steps: int | None = None) -> None:
    """All rows, or those of some steps, each once."""
    batches = case.batches()
    if not batches:
        if case.size > 1:
            with pytest.raises(ValueError, match="nothing to validate on"):
                validation(case, 0)
        return
    feeds = [validation(case, rank, steps) for rank in range(case.size)]
    ranks = [read(feed, case.batch_size) for feed in feeds]
    assert all(sum(map(len, rank)) for rank in ranks)  # Keras needs a row
    both = list(zip(feeds, ranks, strict=True))
    own = [rank for feed, rank in both if feed.has_rows]
    limit = None if steps is None else -(-steps // case.size) * case.size
    assert counted(own) == counted([batches[:limit]])
    for feed, rank in both:
        assert not feed.is_exact or feed.plan.steps in (None, len(rank))


def check_training_on_batches(case: Case) -> None:
    """All rows once, in equally many steps."""
    rows, steps = case.promised()
    if not rows:
        with pytest.raises(ValueError, match="no data"):
            training(case, 0)
        return
    feeds = [training(case, rank) for rank in range(case.size)]
    for epoch in range(1 if case.kind == "generator" else 2):
        counts = {steps_of(feed, epoch) for feed in feeds}
        assert case.kind == "generator" or counts == {steps}
        ranks = [read_epoch(feed, epoch, case.batch_size) for feed in feeds]
        assert all(batch for rank in ranks for batch in rank)
        assert counted(ranks) == Counter(rows)
        for feed in feeds:
            assert not feed.is_exact or feed.plan.steps in (None, steps)


def steps_of(feed: Any, epoch: int) -> int:
    """The steps that a rank makes in this epoch; of a generator they are not read."""
    data = feed.arguments["x"]
    feed.begin_epoch(epoch)
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    known = -1 if feed.length is None else int(data.cardinality())
    is_read = known < 0 and feed.source.is_repeatable
    return sum(1 for _ in data) if is_read else known


def read_epoch(feed: Any, epoch: int, batch_size: int) -> list[list[int]]:
    """The rows that Keras reads in this epoch, batch by batch."""
    feed.begin_epoch(epoch)
    return read(feed, batch_size)


def check_training_on_arrays(case: Case) -> None:
    """Each pass has all rows once."""
    if case.rows < case.size:
        with pytest.raises(ValueError, match="at least one row"):
            training(case, 0)
        return
    if case.size == 1 and not case.keeps_position:
        return  # Keras itself reads the arrays
    feeds = [training(case, rank) for rank in range(case.size)]
    first = feeds[0]
    in_pass = first.plan.total
    assert in_pass == case.rows
    of_ranks: list[list[list[int]]] = [[] for _ in feeds]
    for epoch in range(3):
        for feed, batches in zip(feeds, of_ranks, strict=True):
            batches += read_with_marks(feed, epoch)
            assert len(batches) == feed.plan.steps * (epoch + 1)
    rows: list[int] = []
    for number, of_step in enumerate(zip(*of_ranks, strict=True)):
        assert all(len(batch) <= case.batch_size for batch in of_step)
        rows += [row for batch in of_step for row in batch]
        _, start, end = first.division.span(tf.constant(number, tf.int64))
        assert sum(map(len, of_step)) == int(end - start)
    for begin in range(0, len(rows), in_pass):
        passed = Counter(rows[begin : begin + in_pass])
        assert max(passed.values()) == 1
        assert case.shuffle or set(passed) <= set(range(in_pass))


def read_with_marks(feed: Any, epoch: int) -> list[list[int]]:
    """The rows of each step of this rank; none where its batch does not count."""
    feed.begin_epoch(epoch)
    data = list(feed.arguments["x"])
    if not feed.is_marked:
        return ids_of_batches(data)
    rows = ids_of_batches([batch for batch, _ in data])
    marks = [int(mark[0]) for _, mark in data]
    return [own * mark for own, mark in zip(rows, marks, strict=True)]


def check(case: Case) -> None:
    """An evaluation and two or three epochs of training, by all ranks."""
    check_evaluation(case)
    if case.size > 1:
        check_evaluation(case, case.steps)
    if case.kind in BATCHES:
        check_training_on_batches(case)
    elif case.kind not in QUICK:
        check_training_on_arrays(case)


@pytest.mark.parametrize("begin", range(FIRST, FIRST + COUNT, CHUNK))
def test_every_row_is_counted_once(begin):
    """In evaluations all rows, in training those that the plan promises."""
    for seed in range(begin, min(begin + CHUNK, FIRST + COUNT)):
        case = draw(seed, KINDS)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error


def test_every_row_is_counted_once_in_many_quick_cases():
    """Of the kinds that need no `tf.data`: arrays in evaluations, and sequences."""
    for seed in range(16 * COUNT):
        case = draw(seed, QUICK)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error
