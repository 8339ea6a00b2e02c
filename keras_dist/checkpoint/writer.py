"""Write checkpoints in a thread while the training continues."""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from keras_dist.checkpoint.files import Folder


class Writer:
    """A thread that writes checkpoints to a folder.

    If a checkpoint is submitted while another one is still being written, it waits. A
    waiting checkpoint is replaced by the next one, so that a slow disk does not slow
    down the training. Its number is left out then: a number is the same checkpoint in
    the folders of all hosts.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._next: Any = None
        self._number = folder.number
        self._is_busy = self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, tree: Any) -> None:
        """Let the thread write a checkpoint; its arrays must not be changed later."""
        with self._changed:
            self._number += 1
            self._next = self._number, tree
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the thread has nothing left to write, with or without an error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy and self._next is None)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def take_error(self) -> Exception | None:
        """Return the error of the last write, if any, and forget it."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next is not None or self._is_closed
                )
                if self._next is None:
                    return
                (number, tree), self._next, self._is_busy = self._next, None, True
            error: Exception | None = None
            try:
                self._folder.write(tree, number)
            except Exception as caught:  # raised here, it would only end this thread
                error = caught
            del tree  # as large as the model
            with self._changed:
                self._error, self._is_busy = error, False
                self._changed.notify_all()


def warn_of(failures: Sequence[str]) -> None:
    """Warn of checkpoints that could not be written.

    Args:
        failures: For each rank its error, or "".
    """
    failed = [text for text in failures if text]
    if failed:
        warnings.warn(
            "A checkpoint could not be written. The training continues, and the "
            f"checkpoints before it are still there. Received: {'; '.join(failed)}",
            stacklevel=2,
        )
