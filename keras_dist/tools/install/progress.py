"""The line that shows how far the build is, read from its verbose output."""

import re
import time
from collections.abc import Callable
from typing import TextIO

# Percent between two printed lines if the output is not a terminal.
_STEP = 10

_PERCENT = re.compile(r"\s*\[\s*(\d{1,3})%\]")


def percent_of(line: str) -> int | None:
    """The percentage in a line of the build's output; `None` if there is none.

    >>> percent_of("  [ 37%] Building CXX object gloo/types.cc.o")
    37
    """
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


class Progress:
    """Prints how far the build is.

    On a terminal it overwrites one line. Elsewhere, as in a log of a build server, it
    prints a new line every 10 percent.

    Args:
        title: What is being done.
        stream: The stream to print to.
        is_terminal: Whether the stream is a terminal.
        clock: A function that returns the time in seconds.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO,
        *,
        is_terminal: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._title = title
        self._stream = stream
        self._is_terminal = is_terminal
        self._clock = clock
        self._start = clock()
        self._percent = 0
        self._printed: tuple[int, int] | None = None

    def read(self, line: str) -> None:
        """Read one line of the build's output, and print if something has changed."""
        self._percent = max(self._percent, percent_of(line) or 0)
        self._show()

    def finish(self) -> None:
        """End the line, so that the next print begins a new one."""
        if self._is_terminal and self._printed is not None:
            print(file=self._stream, flush=True)

    def _show(self) -> None:
        seconds = int(self._clock() - self._start)
        text = f"{self._title}: {self._percent} %, {seconds} s"
        if self._is_terminal:
            if self._printed != (self._percent, seconds):
                print(f"\r{text}", end="", file=self._stream, flush=True)
                self._printed = (self._percent, seconds)
            return
        step = self._percent // _STEP
        if self._printed is None or step > self._printed[0]:
            print(text, file=self._stream, flush=True)
            self._printed = (step, seconds)
