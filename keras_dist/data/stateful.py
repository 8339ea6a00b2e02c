"""Data that says where it is, and that can begin there.

Two protocols are known. The data has `state_dict()` and `load_state_dict(state)`, which
speak of the pass that was begun last: torchdata's `StatefulDataLoader`, Hugging Face
`IterableDataset`. Or its iterators have `get_state()` and `set_state(state)`: Grain.

A library may promise less than a checkpoint needs: a shuffle buffer is not in the state
of `IterableDataset`. So a `Mark` is made of the state *before* the last step that was
trained, with a digest of a batch of that step: to begin there, the step is read again,
and compared.
"""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras_dist.data.source import Source, fingerprint_of


@dataclass(frozen=True)
class Mark:
    """The position after a step. Names of the fields are names in the file format.

    Args:
        state: Of the data before that step; `None` at the beginning of a pass.
        at: Batches of the pass that were read before that step.
        row: Batches of the pass that were read after it.
        digest: Of the first batch of the step.
        is_dealt: Whether the batches are the same on all ranks, and dealt to them.
    """

    state: Any
    at: int
    row: int
    digest: str
    is_dealt: bool


class Reading:
    """One pass over data that says where it is.

    Args:
        data: The data.
        state: Where to begin; `None` for the beginning.
        read: Batches of the pass before that.

    Attributes:
        read: Batches of the pass that were read, without one that was peeked at.
    """

    def __init__(self, data: Any, state: Any = None, read: int = 0) -> None:
        self.read = read
        self._peeked: list[Any] = []
        self._before: tuple[Any, int] = (None, 0)
        self._first: Any = None
        if has_state_dict(data):
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
        self._peeked = list(itertools.islice(self._iterator, count))
        return list(self._peeked)

    def begin_step(self) -> None:
        """Remember the state: the batches that are read next are those of one step."""
        self._first = None
        if not self._peeked:
            self._before = self._state()

    def step(self) -> "Step":
        """Return what is to be known of the step whose batches were read."""
        return Step(*self._before, self.read, self._first)

    def _state(self) -> tuple[Any, int]:
        # Before its first batch, `state_dict` may speak of the pass before.
        state = copy.deepcopy(self._state_of()) if self.read else None
        return state, self.read


@dataclass(frozen=True)
class Step:
    """A step that was read: state and count before it, count after it, its batch."""

    state: Any
    at: int
    row: int
    first: Any

    def mark(self, *, is_dealt: bool) -> Mark:
        """Return the position after it."""
        digest = fingerprint_of([self.first])
        return Mark(self.state, self.at, self.row, digest, is_dealt)


def has_state_dict(value: Any) -> bool:
    """Tell whether an object has `state_dict` and `load_state_dict`."""
    return _has_all(value, "state_dict", "load_state_dict")


def track(source: Source, size: int) -> bool:
    """Let a source be read by `Reading`, if it can be; tell whether it can.

    What has to be known of its first batches is read now: later, that would be another
    pass than the one that `state_dict` speaks of.
    """
    data = source.data
    if source.kind != "stream" or not source.is_repeatable:
        return False
    if not has_state_dict(data) and not _has_all(iter(data), "get_state", "set_state"):
        return False
    source.hold(max(2, size))
    return True


def restored(data: Any, mark: Mark) -> Reading | None:
    """Begin after a mark by its state; `None` if it does not bring the batches back.

    Raises:
        ValueError: If the data would begin all later passes there, too.
    """
    if mark.state is None:
        return None
    is_kept = has_state_dict(data) and _keeps_state(data, mark.state)
    reading = Reading(data, mark.state, mark.at)
    first = list(itertools.islice(reading, 1))
    if is_kept:
        data.load_state_dict(None)  # for later passes; this one has begun
    return _after(reading, first, mark)


def skipped(data: Any, mark: Mark) -> Reading | None:
    """Read from the beginning to a mark; `None` if the batches are other ones."""
    reading = Reading(data)
    deque(itertools.islice(reading, mark.at), maxlen=0)
    return _after(reading, list(itertools.islice(reading, 1)), mark)


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
