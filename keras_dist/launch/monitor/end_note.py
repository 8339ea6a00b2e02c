"""Why a rank has ended, in the store of the job, for the ranks that wait for it."""

import atexit
import contextlib
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.store import StoreClient, client_of

# The file in which torchrun looks for the error of a process.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# Name of the note in the store.
_NAME = "ended"

_SECONDARY = "Another rank has ended while this one waited for it."

# Seconds for which the rank with the store stays, so that others read the note.
_READ_SECONDS = 1.0


class EndNote:
    """Notes what ends this rank: an error, or an exit inside of a fit.

    Args:
        rank: Rank of this process.
        store: The store of the job; `None` for none.
    """

    def __init__(self, rank: int, store: StoreClient | None) -> None:
        self._rank, self._store = rank, store
        self.is_written = self._has_error = False
        self._print_error = sys.excepthook
        sys.excepthook = self._note_error
        # Before Horovod, which was started earlier, ends the others' collectives.
        atexit.register(self._note_exit)

    def _note_error(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if not rank_process.is_secondary(str(error)):
            self._write("has failed; its traceback is the cause")
        if path := os.environ.get(_ERROR_FILE):
            lines = traceback.format_exception(kind, error, trace)
            details = {
                "py_callstack": "".join(lines),
                "timestamp": f"{time.time():.0f}",
            }
            message = {"message": f"{kind.__name__}: {error}", "extraInfo": details}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": message}))
        self._has_error = True
        self._print_error(kind, error, trace)

    def _note_exit(self) -> None:
        position = record.here.position
        if position.phase and not self._has_error:
            epoch = position.epoch + 1
            self._write(
                f"ended with no error in epoch {epoch} while others were training"
            )

    def _write(self, text: str) -> None:
        """Write the note, unless another rank was the first to end."""
        if self._store is not None and self._store.get(_NAME) is None:
            note = f"Rank {self._rank} on {socket.gethostname()} {text}."
            self.is_written = self._store.put(_NAME, note)


_notes: list[EndNote] = []


def note_end(rank: int) -> None:
    """Let the other ranks, and torchrun, know what ends this rank.

    Args:
        rank: Rank of this process.
    """
    if not _notes:
        _notes.append(EndNote(rank, client_of()))


def describe_ended_rank() -> str:
    """Return why a collective has ended early: by which rank, if that is known."""
    store = client_of()
    note = None if store is None else store.get(_NAME)
    return (
        f"{_SECONDARY} {note or 'Its own error, printed by that rank, is the cause.'}"
    )


def stay_for_readers() -> None:
    """Wait until others have read the note of this rank, which has the store."""
    if any(note.is_written for note in _notes):
        time.sleep(_READ_SECONDS)
