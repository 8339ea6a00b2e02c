"""A record of where this rank is, in a few bytes that other processes can read."""

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Number of changes, epoch, step, phase, collective.
_LAYOUT = struct.Struct("<qqq24s104s")
EMPTY = bytes(_LAYOUT.size)

# `keras-dist run` sets this variable to the path of the record file. So it can read the
# record even when this process was killed.
VARIABLE = "KERAS_DIST_RECORD"


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is in its fit.

    Args:
        changes: How often the record was written.
        epoch: Epoch of the fit, from 0.
        step: Step of the epoch, or of the evaluation, from 0.
        phase: Part of the fit: "begin", "step", "test" or "end"; empty outside of a
            fit.
        collective: Name of the collective that Python waits in; empty outside of one.
            A collective inside a compiled step is not seen.
    """

    changes: int = 0
    epoch: int = 0
    step: int = 0
    phase: str = ""
    collective: str = ""

    def describe_exit(self) -> str:
        """Return what a rank did that ended here with exit code 0; empty if nothing."""
        epoch = f"epoch {self.epoch + 1}"
        text = f"ended with no error in {epoch} while others were training"
        return text if self.phase else ""

    def __str__(self) -> str:
        """Return the position in words.

        >>> print(RankPosition(epoch=1, step=6, phase="step", collective="dist.sum"))
        in the collective dist.sum, in step 7 of epoch 2
        >>> print(RankPosition(phase="end"), "/", RankPosition(changes=1))
        at the end of epoch 1 / in user code, outside of a fit
        """
        epoch = f"epoch {self.epoch + 1}"
        texts = {
            "": "in user code, outside of a fit",
            "begin": f"at the beginning of {epoch}",
            "step": f"in step {self.step + 1} of {epoch}",
            "test": f"in step {self.step + 1} of an evaluation in {epoch}",
            "end": f"at the end of {epoch}",
        }
        text = texts.get(self.phase, self.phase)
        return (
            f"in the collective {self.collective}, {text}" if self.collective else text
        )


class Record:
    """The record of this rank, which it writes and other processes can read.

    Args:
        path: A file that the launcher made; the record is kept in memory by default,
            and where this process does not see that file, as in some containers.
    """

    def __init__(self, path: str | None = None) -> None:
        self._buffer: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
        # Never a file with a name, which has the same path in such a container.
        with contextlib.suppress(OSError):
            if path and os.stat(path).st_nlink == 0:
                with open(path, "r+b") as file:
                    self._buffer = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.position = RankPosition()  # that was written last
        self.is_alone = False  # others wait for what this rank alone does
        # The thread that trains: Ray Train's is not the main one.
        self.thread = threading.main_thread().ident

    def enter(self, phase: str, *, epoch: int | None = None, step: int = 0) -> None:
        """Record that this rank enters a phase, by default of the same epoch."""
        self.thread = threading.get_ident()
        epoch = self.position.epoch if epoch is None else epoch
        self._write(phase, epoch, step, "")

    @contextlib.contextmanager
    def wait_in(self, collective: str) -> Iterator[None]:
        """Context manager in which this rank waits in a collective, by its record."""
        before = self.position
        self._write(before.phase, before.epoch, before.step, collective)
        try:
            yield
        finally:
            self._write(before.phase, before.epoch, before.step, "")

    def detach(self) -> None:
        """Write from now on to memory of this process alone."""
        self._buffer = bytearray(self._buffer)

    def _write(self, phase: str, epoch: int, step: int, collective: str) -> None:
        changes = self.position.changes + 1
        self.position = RankPosition(changes, epoch, step, phase, collective)
        _LAYOUT.pack_into(
            self._buffer,
            0,
            changes,
            epoch,
            step,
            phase.encode(),
            collective.encode(errors="replace"),
        )


def read(path: str | os.PathLike[str]) -> RankPosition:
    """Read the record of another process, whose file was `EMPTY` at first."""
    *numbers, phase, collective = _LAYOUT.unpack(Path(path).read_bytes())
    names = (raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, collective))
    return RankPosition(*numbers, *names)


# Of this process alone: those that it starts or forks are elsewhere.
here = Record(os.environ.pop(VARIABLE, None))
os.register_at_fork(after_in_child=here.detach)
