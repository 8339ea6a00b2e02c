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
from keras_dist.launch.store import MANY, find_store

# The file in which torchrun looks for the error of a process.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# Name of the note in the store.
_NAME = "ended"

# Seconds for which the rank with the store stays, so that others read its note.
_READ_SECONDS = 1.0


def note_end(rank: int) -> None:
    """Let the other ranks, and torchrun, know what will end this rank.

    It is an error, or an exit inside of a fit.
    """
    store, print_error, errors = find_store(), sys.excepthook, list[BaseException]()

    def write(text: str) -> None:
        # Unless another rank was the first to end.
        if store is not None and store.get(_NAME) is None:
            note = f"Rank {rank} on {socket.gethostname()} {text}."
            store.put(_NAME, note, attempts=MANY)

    def note_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        errors.append(error)
        if not rank_process.is_secondary(error):
            write("has failed; its traceback is the cause")
        if path := os.environ.get(_ERROR_FILE):
            lines = traceback.format_exception(kind, error, trace)
            more = {"py_callstack": "".join(lines), "timestamp": f"{time.time():.0f}"}
            message = {"message": f"{kind.__name__}: {error}", "extraInfo": more}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": message}))
        print_error(kind, error, trace)

    def note_exit() -> None:
        if not errors and (text := record.here.position.describe_exit()):
            write(text)

    sys.excepthook = note_error
    # Before Horovod, which was started earlier, ends the others' collectives.
    atexit.register(note_exit)


def describe_ended_rank() -> str:
    """Return why a collective has ended early: by which rank, if that is known."""
    note = (store := find_store()) and store.get(_NAME)
    note = note or "Its own error, printed by that rank, is the cause."
    return f"Another rank has ended while this one waited for it. {note}"


def stay_for_readers() -> None:
    """Wait until others have read the note of this rank, which has the store."""
    if (store := find_store()) and store.get(_NAME):
        time.sleep(_READ_SECONDS)
