"""Data that says where it is, and that can begin there.

Three protocols are known. The data has `state_dict()` and `load_state_dict(state)`,
which speak of the pass that was begun last: torchdata's `StatefulDataLoader`, Hugging
Face `IterableDataset`. Or its iterators have `get_state()` and `set_state(state)`:
Grain. Or it is a `tf.data.Dataset`, whose iterators TensorFlow can save.

A library may promise less than a checkpoint needs: a shuffle buffer is not in the state
of `IterableDataset`. So a `Mark` is made of the state *before* the last step that was
trained, with a digest of a batch of that step: to begin there, the step is read again,
and compared. TensorFlow keeps its promise, and its state has all rows of its buffers:
it is taken only when a checkpoint is written, *after* the step.
"""

import copy
import functools
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_dist.data.division import ShardSpec
from keras_dist.data.pipeline import (
    finite_or_none,
    iterator_state,
    set_iterator_state,
    skip_epochs,
    skip_passes,
)
from keras_dist.data.source import Source, fingerprint_of


@dataclass(frozen=True)
class Mark:
    """The position after a step. Names of the fields are names in the file format.

    Args:
        state: Of the data before that step; `None` at the beginning of a pass, and
            where there is none.
        at: Batches of the pass that were read before that step.
        row: Batches of the pass that were read after it.
        digest: Of the first batch of the step.
        is_dealt: Whether the batches are the same on all ranks, and dealt to them.
        is_after: Whether `state` is that after the step.
        previous: The end of the pass before, where that is what leads to this pass.
    """

    state: Any
    at: int
    row: int
    digest: str
    is_dealt: bool
    is_after: bool = False
    previous: "Mark | None" = None


class Reading:
    """One pass over data that says where it is.

    Args:
        source: The data.
        state: Where to begin; `None` for the beginning.
        read: Batches of the pass before that.
        previous: The end of the pass before, if this data counts them.

    Attributes:
        read: Batches of the pass that were read, without one that was peeked at.
    """

    def __init__(
        self,
        source: Source,
        state: Any = None,
        read: int = 0,
        previous: Mark | None = None,
    ) -> None:
        data = source.data
        self.read, self.previous = read, previous
        self._peeked: list[Any] = []
        self._before: tuple[Any, int] = (None, 0)
        self._first: Any = None
        self._is_dataset = isinstance(data, tf.data.Dataset)
        self._iterator: Any
        if self._is_dataset:
            if state is None:
                self._iterator, self._peeked = source.begin()
            else:
                self._iterator = source.new_pass()
                set_iterator_state(self._iterator, state)
            self._state_of = functools.partial(iterator_state, self._iterator)
        elif has_state_dict(data):
            if state is not None:
                data.load_state_dict(copy.deepcopy(state))
            self._iterator, self._state_of = iter(data), data.state_dict
        else:
            self._iterator = iter(data)
            self._state_of = self._iterator.get_state
            if state is not None:
                self._iterator.set_state(copy.deepcopy(state))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._peeked.pop(0) if self._peeked else next(self._iterator)
        self._first = batch if self._first is None else self._first
        self.read += 1
        return batch

    def peek(self, count: int) -> list[Any]:
        """Read batches of the next step ahead; to be called before `begin_step`.

        Args:
            count: At most as many as the step has.
        """
        self._before = self._state()
        more = max(count - len(self._peeked), 0)
        self._peeked += itertools.islice(self._iterator, more)
        return self._peeked[:count]

    def begin_step(self) -> None:
        """Remember the state: the batches that are read next are those of one step."""
        self._first = None
        if not self._peeked:
            self._before = self._state()

    def step(self) -> "Step":
        """Return what is to be known of the step whose batches were read."""
        return Step(*self._before, self.read, self._first, self)

    def state_after(self, row: int) -> Any:
        """Return the state after so many batches, if it is known: of a data set."""
        if not self._is_dataset or self._peeked or self.read != row:
            return None
        try:
            return self._state_of()
        except tf.errors.OpError:
            return None

    def _state(self) -> tuple[Any, int]:
        if self._is_dataset:
            return None, self.read
        # Before its first batch, `state_dict` may speak of the pass before.
        state = copy.deepcopy(self._state_of()) if self.read else None
        return state, self.read


@dataclass(frozen=True)
class Step:
    """A step that was read: state and count before it, count after it, its batch.

    And what has read it, which may have read more since.
    """

    state: Any
    at: int
    row: int
    first: Any
    reading: Reading

    def mark(self, *, is_dealt: bool) -> Mark:
        """Return the position after it."""
        digest = fingerprint_of([self.first])
        after = self.reading.state_after(self.row)
        is_after = after is not None
        state = after if is_after else self.state
        previous = self.reading.previous if state is None else None
        return Mark(state, self.at, self.row, digest, is_dealt, is_after, previous)


def has_state_dict(value: Any) -> bool:
    """Tell whether an object has `state_dict` and `load_state_dict`."""
    return _has_all(value, "state_dict", "load_state_dict")


def track(source: Source, spec: ShardSpec, passes: int, *, has_steps: bool) -> bool:
    """Let a source be read by `Reading`, if it can be; tell whether it can.

    What has to be known of its first batches is read now: later, that would be another
    pass than the one that `state_dict` speaks of.

    Args:
        source: The data.
        spec: The ranks.
        passes: Passes that were read before the one that is read next.
        has_steps: Whether epochs have a number of steps, and passes go on in the next.
    """
    data, presharded = source.data, source.presharded
    if source.kind == "sequence" or not source.is_repeatable:
        return False
    if source.kind == "stream":
        by_iterators = ("get_state", "set_state")
        if not has_state_dict(data) and not _has_all(iter(data), *by_iterators):
            return False
        source.hold(max(2, spec.size))
        return True
    has_marks = presharded is not None and presharded.is_global and spec.size > 1
    if has_marks and finite_or_none(source.length) is not None:
        return False  # the last batch may have no row for a rank
    if not source.may_have_state():
        return False
    if source.has_seeded_passes:
        (skip_passes if has_steps else skip_epochs)(data, passes)
    source.hold(max(2, spec.size))
    return source.has_iterator_state()


def restored(source: Source, mark: Mark) -> Reading | None:
    """Begin after a mark by its state; `None` if it does not bring the batches back.

    After the first step of a pass it is the end of the pass before that leads there.

    Raises:
        ValueError: If the data would begin all later passes there, too.
    """
    if mark.previous is not None:
        if passed_over(source, mark.previous) is None:
            return None
        return skipped(source, mark)
    if mark.state is None:
        return None
    if mark.is_after:
        return _continued(source, mark)
    data = source.data
    is_kept = has_state_dict(data) and _keeps_state(data, mark.state)
    reading = Reading(source, mark.state, mark.at)
    first = list(itertools.islice(reading, 1))
    if is_kept:
        data.load_state_dict(None)  # for later passes; this one has begun
    return _after(reading, first, mark)


def passed_over(source: Source, mark: Mark) -> Reading | None:
    """Let the next pass be the one after a mark, whose step was the last of a pass.

    So it has the order that it would have had. `None` if the state does not lead there:
    then it is the first pass of this process.
    """
    reading = restored(source, mark)
    if reading is not None:
        # A rank may have more batches than others, which it would not have read.
        deque(itertools.islice(reading, mark.row - mark.at), maxlen=0)
        source.passed = mark
    return reading


def skipped(source: Source, mark: Mark) -> Reading | None:
    """Read from the beginning to a mark; `None` if the batches are other ones."""
    reading = Reading(source)
    deque(itertools.islice(reading, mark.at), maxlen=0)
    return _after(reading, list(itertools.islice(reading, 1)), mark)


def _continued(source: Source, mark: Mark) -> Reading | None:
    """Begin after a step by the state after it; `None` for another pipeline."""
    if not isinstance(source.data, tf.data.Dataset):
        return None
    try:
        reading = Reading(source, mark.state, mark.row)
        reading.peek(1)  # files that it needs may be missing
    except tf.errors.OpError:
        return None
    return reading


def _after(reading: Reading, first: list[Any], mark: Mark) -> Reading | None:
    """Read the other batches of the marked step, if its first one is the same."""
    if not first or fingerprint_of(first) != mark.digest:
        return None
    deque(itertools.islice(reading, mark.row - mark.at - 1), maxlen=0)
    return reading if reading.read == mark.row else None


def _keeps_state(data: Any, state: Any) -> bool:
    """Tell whether all passes begin at a loaded state, until another one is loaded."""

    def first() -> str:
        return fingerprint_of(itertools.islice(iter(data), 1))

    data.load_state_dict(copy.deepcopy(state))
    there = first()
    if first() != there:
        return False
    data.load_state_dict(None)
    if first() == there:
        raise ValueError(
            "After `load_state_dict(state)`, all passes over the data begin at that "
            "state, so that later epochs would lack its beginning. Received: x of type "
            f"{type(data).__name__}. Let the state be used by the next pass alone, or "
            "let `load_state_dict(None)` undo it."
        )
    return True


def _has_all(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)
