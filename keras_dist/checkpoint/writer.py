"""Write checkpoints while the training goes on."""

import threading
from typing import Any

from keras_dist.checkpoint.files import Folder


class Writer:
    """Writes in a thread of its own what it is given; the last counts.

    Where the disk is slower than checkpoints come, those that nobody has begun to write
    give way to newer ones.

    Args:
        folder: To write to.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._next: Any = None
        self._is_busy = self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, tree: Any) -> None:
        """Write `tree` soon; nobody changes its arrays any more."""
        with self._changed:
            self._next = tree
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is written, or could not be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy and self._next is None)

    def close(self) -> None:
        """Wait, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def failure(self) -> Exception | None:
        """Why the last checkpoint could not be written, told once."""
        with self._changed:
            failure, self._failure = self._failure, None
        return failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._next is not None or self._is_closed
                )
                if self._next is None:
                    return
                tree, self._next, self._is_busy = self._next, None, True
            failure: Exception | None = None
            try:
                self._folder.write(tree)
            except Exception as error:  # nobody would hear of it in this thread
                failure = error
            del tree  # as large as the model
            with self._changed:
                self._failure, self._is_busy = failure, False
                self._changed.notify_all()
