"""Every row is counted once: random data of all kinds, all ranks in one process.

ROWS_FIRST=0 ROWS_COUNT=200 tries others, and more.
"""

import os
from collections import Counter
from typing import Any

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
    draw,
    ids_of_batches,
)

from keras_dist.data import (
    Agreed,
    ShardSpec,
    Source,
    training_feed,
    validation_feed,
)

FIRST = int(os.environ.get("ROWS_FIRST", "0"))
COUNT = int(os.environ.get("ROWS_COUNT", "20"))

# Cases in one test of pytest.
CHUNK = 20

# They are read without TensorFlow: a thousand cases a second.
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


def validation(case: Case, rank: int) -> Any:
    """The same for an evaluation."""
    data = case.data()
    return validation_feed(
        data if case.kind in ARRAYS else source_of(data, case.size),
        batch_size=case.batch_size,
        steps=None,
        steps_rule="divide",
        spec=spec_of(case, rank, "validation"),
    )


def source_of(data, size):
    """What `dist_fit` makes of it, after its first batches were compared."""
    if size == 1:
        return data
    source = Source(data, agreed=Agreed(is_same=True))
    source.fingerprint(size)
    return source


def read(feed: Any, batch_size: int) -> list[list[int]]:
    """The rows that Keras reads in an epoch, batch by batch."""
    x, y = feed.arguments["x"], feed.arguments["y"]
    if feed.part.is_marked:  # each with a number that says whether its rows count
        x = [batch for batch, mark in x if int(mark[0])]
    if y is None:
        return ids_of_batches(x)
    ids = np.asarray(y).astype(int).tolist()
    assert np.asarray(x).astype(int).tolist() == ids
    return [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)]


def check_evaluation(case: Case) -> None:
    """All rows, each once."""
    batches = case.batches()
    if not batches:
        if case.size > 1:
            with pytest.raises(ValueError, match="nothing to validate on"):
                validation(case, 0)
        return
    feeds = [validation(case, rank) for rank in range(case.size)]
    ranks = [read(feed, case.batch_size) for feed in feeds]
    assert all(sum(map(len, rank)) for rank in ranks)  # Keras needs a row
    both = list(zip(feeds, ranks, strict=True))
    own = [rank for feed, rank in both if feed.part.has_rows]
    assert counted(own) == counted([batches])
    for feed, rank in both:
        assert not feed.is_exact or feed.plan.steps in (None, len(rank))


def check_training_on_batches(case: Case) -> None:
    """All rows once, but for fewer than there are ranks, in equally many steps."""
    batches = case.batches()
    rows, steps = case.promised()
    if not rows:
        with pytest.raises(ValueError, match="at least one row|no data"):
            training(case, 0)
        return
    assert sum(map(len, batches)) - len(rows) < case.size
    feeds = [training(case, rank) for rank in range(case.size)]
    # Shuffled, other rows are left out in each epoch, perhaps none.
    is_fixed = not (case.shuffle and case.kind in SEQUENCES)
    for epoch in range(1 if case.kind == "generator" else 2):
        ranks = [read_epoch(feed, epoch, case.batch_size) for feed in feeds]
        assert all(batch for rank in ranks for batch in rank)
        assert len({len(rank) for rank in ranks}) == 1
        missing = counted([batches]) - counted(ranks)
        assert not counted(ranks) - counted([batches])
        assert missing.total() < case.size
        if is_fixed:
            assert len(ranks[0]) == steps and counted(ranks) == Counter(rows)
        for rank, feed in zip(ranks, feeds, strict=True):
            assert not (is_fixed and feed.is_exact) or feed.plan.steps in (None, steps)
            if feed.batches_at is not None and case.kind != "shuffled":
                check_indices(feed, epoch, rank, batches)


def read_epoch(feed: Any, epoch: int, batch_size: int) -> list[list[int]]:
    """The rows that Keras reads in this epoch, batch by batch."""
    feed.begin_epoch(epoch)
    return read(feed, batch_size)


def check_indices(feed: Any, epoch: int, rank: Any, batches: Any) -> None:
    """The batches that `NanReport` names are those that the rows are of."""
    for step, batch in enumerate(rank):
        named = [row for i in feed.batches_at(epoch, step) for row in batches[i]]
        assert not Counter(batch) - Counter(named)


def check_training_on_arrays(case: Case) -> None:
    """Each pass has all rows once, but for those that the plan leaves out."""
    if case.rows < case.size:
        with pytest.raises(ValueError, match="at least one row"):
            training(case, 0)
        return
    if case.size == 1 and not case.keeps_position:
        return  # Keras itself reads the arrays
    feeds = [training(case, rank) for rank in range(case.size)]
    first = feeds[0]
    in_pass = first.plan.total - first.plan.left_out
    assert first.plan.total == case.rows and 0 <= first.plan.left_out < case.size
    assert sum(feed.plan.of_rank for feed in feeds) == in_pass
    of_ranks: list[list[list[int]]] = [[] for _ in feeds]
    for epoch in range(3):
        for feed, batches in zip(feeds, of_ranks, strict=True):
            batches += read_epoch(feed, epoch, case.batch_size)
            assert len(batches) == feed.plan.steps * (epoch + 1)
    rows: list[int] = []
    for number, of_step in enumerate(zip(*of_ranks, strict=True)):
        assert all(1 <= len(batch) <= case.batch_size for batch in of_step)
        rows += [row for batch in of_step for row in batch]
        _, start, end = first.division.span(tf.constant(number, tf.int64))
        assert sum(map(len, of_step)) == int(end - start)
    for begin in range(0, len(rows), in_pass):
        passed = Counter(rows[begin : begin + in_pass])
        assert max(passed.values()) == 1
        assert case.shuffle or set(passed) <= set(range(in_pass))


def check(case: Case) -> None:
    """An evaluation and two or three epochs of training, by all ranks."""
    check_evaluation(case)
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


def test_every_row_is_counted_once_in_thousands_of_cases():
    """Of the kinds that need no `tf.data`: arrays in evaluations, and sequences."""
    for seed in range(50 * COUNT):
        case = draw(seed, QUICK)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}") from error
