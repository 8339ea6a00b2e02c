"""A record of where this rank is, in a few bytes that other processes can read."""

import contextlib
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

from keras_dist.launch.monitor.rank_process import POSITION_BYTES, RECORD, record_path

# The fields of `RankPosition`.
_LAYOUT = struct.Struct("<qqq24s104s")
EMPTY = bytes(POSITION_BYTES)


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
        path: A file that the launcher made, and reads even when this process was
            killed; by default the record is kept in memory.
    """

    def __init__(self, path: str | None = None) -> None:
        self._buffer: mmap.mmap | bytearray = bytearray(POSITION_BYTES)
        if path:
            with open(path, "r+b") as file:
                self._buffer = mmap.mmap(file.fileno(), POSITION_BYTES)
        self.position = RankPosition()  # that was written last
        self.is_alone = False  # others wait for what this rank alone does
        # The thread that trains: Ray Train's is not the main one.
        self.thread = threading.main_thread().ident

    def enter(self, phase: str, *, epoch: int | None = None, step: int = 0) -> None:
        """Record that this rank enters a phase, by default of the same epoch."""
        self.thread = threading.get_ident()
        epoch = self.position.epoch if epoch is None else epoch
        self._write(epoch=epoch, step=step, phase=phase, collective="")

    @contextlib.contextmanager
    def wait_in(self, collective: str) -> Iterator[None]:
        """Context manager in which this rank waits in a collective, by its record."""
        self._write(collective=collective)
        try:
            yield
        finally:
            self._write(collective="")

    def detach(self) -> None:
        """Write from now on to memory of this process alone."""
        self._buffer = bytearray(self._buffer)

    def _write(self, **values: Any) -> None:
        changes = self.position.changes + 1
        self.position = replace(self.position, changes=changes, **values)
        *numbers, phase, collective = vars(self.position).values()
        names = (name.encode(errors="replace") for name in (phase, collective))
        _LAYOUT.pack_into(self._buffer, 0, *numbers, *names)


def read(descriptor: int) -> tuple[RankPosition, str]:
    """Read the record of a rank, which was `EMPTY` at first, and its report."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    *numbers, phase, collective = _LAYOUT.unpack_from(content)
    names = (raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, collective))
    report = content[POSITION_BYTES:].decode(errors="replace")
    return RankPosition(*numbers, *names), report


def make_file() -> IO[bytes]:
    """Make a file in memory that is in no folder."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("keras_dist"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)  # as where Python is that of Conda


def name_file(file: IO[bytes]) -> str:
    """Return a path by which other processes of this user, and no others, open a file.

    They need not inherit its descriptor, which is lost behind a `conda run`.
    """
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


# Of this process alone: those that it starts or forks are elsewhere.
here = Record(record_path)
os.environ.pop(RECORD, None)
os.register_at_fork(after_in_child=here.detach)
