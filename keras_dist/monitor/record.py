"""Where this rank is, in a few bytes that can be read from outside at any time."""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Changes so far, epoch, step, time of the last change, phase, collective.
_LAYOUT = struct.Struct("<qqqd24s104s")

# The launcher names a file here, and reads it when this process can say nothing more.
VARIABLE = "KERAS_DIST_RECORD"


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Args:
        changes: How often the record was written.
        epoch: Of the fit, from 0.
        step: Of the epoch, or of the evaluation, from 0.
        since: When it came there, as `time.time`.
        phase: What it does in a fit; empty outside of one.
        collective: Name of the collective that Python waits in; empty outside of one.
    """

    changes: int = 0
    epoch: int = 0
    step: int = 0
    since: float = 0.0
    phase: str = ""
    collective: str = ""

    @property
    def is_with_others(self) -> bool:
        """Whether it is in a collective, or in a fit, where others wait for it."""
        return bool(self.phase or self.collective)

    def __str__(self) -> str:
        """The place in words.

        >>> print(Position(epoch=1, step=6, phase="step", collective="keras_dist.sum"))
        in the collective keras_dist.sum, in step 7 of epoch 2
        >>> print(Position(phase="end"), "/", Position(changes=1))
        at the end of epoch 1 / in user code, outside of a fit
        """
        epoch = f"epoch {self.epoch + 1}"
        words = {
            "": "in user code, outside of a fit",
            "begin": f"at the beginning of {epoch}",
            "step": f"in step {self.step + 1} of {epoch}",
            "test": f"in step {self.step + 1} of an evaluation in {epoch}",
            "end": f"at the end of {epoch}",
        }
        position = words.get(self.phase, self.phase)
        return (
            f"in the collective {self.collective}, {position}"
            if (self.collective)
            else position
        )


class Record:
    """The place of this rank, written by it and read by anybody.

    Args:
        path: A file of the launcher's; by default memory of this process.
    """

    def __init__(self, path: str | None = None) -> None:
        self._buffer: Any = _mapped(path) if path else bytearray(_LAYOUT.size)
        self._position = Position()

    @property
    def position(self) -> Position:
        """What was written last."""
        return self._position

    def enter(self, phase: str, *, epoch: int | None = None, step: int = 0) -> None:
        """Say what this rank does in a fit.

        Args:
            phase: "begin", "step", "test", "end", or empty: outside of one.
            epoch: By default the one before.
            step: Of the epoch or the evaluation.
        """
        epoch = self._position.epoch if epoch is None else epoch
        self._write(phase, epoch, step, "")

    @contextlib.contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Inside the block, this rank is in a collective that is called so."""
        before = self._position
        self._write(before.phase, before.epoch, before.step, collective)
        try:
            yield
        finally:
            self._write(before.phase, before.epoch, before.step, "")

    def _write(self, phase: str, epoch: int, step: int, collective: str) -> None:
        changes, now = self._position.changes + 1, time.time()
        self._position = Position(changes, epoch, step, now, phase, collective)
        _LAYOUT.pack_into(
            self._buffer,
            0,
            changes,
            epoch,
            step,
            now,
            phase.encode(),
            collective.encode(errors="replace"),
        )


def read(path: str | os.PathLike[str]) -> Position:
    """The place that another process has written last; the default one if none."""
    try:
        data = Path(path).read_bytes()[: _LAYOUT.size]
    except OSError:
        return Position()
    if len(data) < _LAYOUT.size:
        return Position()
    *numbers, phase, collective = _LAYOUT.unpack(data)
    words = (raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, collective))
    return Position(*numbers, *words)


def _mapped(path: str) -> mmap.mmap | bytearray:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), _LAYOUT.size)
    except (OSError, ValueError):
        # The launcher is on another host, or of another version.
        return bytearray(_LAYOUT.size)


def make(path: str | os.PathLike[str]) -> None:
    """Make an empty record for another process."""
    Path(path).write_bytes(bytes(_LAYOUT.size))


here = Record(os.environ.get(VARIABLE))
