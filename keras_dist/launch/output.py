"""What the ranks print: on the screen line by line, or in a file a rank."""

import contextlib
import os
import re
import selectors
import sys
from pathlib import Path
from typing import IO, Any

from keras_dist.launch.startup_noise import is_startup_noise, is_verbose

_CHUNK = 1 << 16

# A line, or one state of a progress bar: what ends with a carriage return. Only the
# next byte says whether a carriage return belongs to the end of a line.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Output:
    """Passes on what the ranks print.

    A line is shown when it is complete, and so is each state of a progress bar: several
    ranks write to one screen. TensorFlow's start-up lines on standard error are left
    out unless `KERAS_DIST_VERBOSE=1` (see `startup_noise`); a file has all lines.

    Args:
        size: How many ranks there are; more than one are told apart by `[rank]`.
        folder: Where to write a file a rank; the screen then shows the first rank
            alone. By default all ranks share the screen.
    """

    def __init__(self, size: int, folder: str | os.PathLike[str] | None) -> None:
        self._size = size
        self._is_verbose = is_verbose()
        self._selector = selectors.DefaultSelector()
        # Whose progress bar stands in the last line of the terminal.
        self._bar: _Lines | None = None
        self._folder = None if folder is None else Path(folder)
        self._files: dict[int, IO[bytes]] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, rank: int, stdout: Any, stderr: Any) -> None:
        """Read from the pipes of a rank."""
        if self._folder is not None:
            # Appended to: the runs of a job that is started again follow each other.
            path = self._folder / f"rank.{rank}.log"
            self._files[rank] = open(path, "ab", buffering=0)  # noqa: SIM115
        for pipe, screen in ((stdout, sys.stdout), (stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            is_filtered = pipe is stderr and not self._is_verbose
            lines = _Lines(rank, self._prefix(rank), screen, is_filtered=is_filtered)
            self._selector.register(pipe, selectors.EVENT_READ, lines)

    def pass_on(self, seconds: float) -> bool:
        """Wait at most so long for something, and pass it on; whether there was any."""
        is_any = False
        for key, _ in self._selector.select(seconds):
            data = _read(key.fd)
            if data is None:
                continue
            if data:
                is_any = True
                self._write(key.data, data)
            else:
                self._finish(key)
        return is_any

    def close(self) -> None:
        """Pass on what is left, of the ranks' children too, and forget the pipes."""
        while self.pass_on(0):
            pass
        for key in list(self._selector.get_map().values()):
            self._finish(key)
        self._selector.close()
        for file in self._files.values():
            file.close()

    def _prefix(self, rank: int) -> bytes:
        return b"" if self._size == 1 or self._folder else f"[{rank}] ".encode()

    def _finish(self, key: Any) -> None:
        if key.data.rest:
            self._write(key.data, b"\n")
        self._selector.unregister(key.fileobj)
        key.fileobj.close()

    def _write(self, lines: "_Lines", data: bytes) -> None:
        if self._folder is not None:
            self._files[lines.rank].write(data)
            if lines.rank:
                return
        shown = lines.add(data)
        if shown:
            with contextlib.suppress(ValueError):  # the screen was closed
                self._show(lines, shown)

    def _show(self, lines: "_Lines", shown: list[bytes]) -> None:
        if self._bar and self._bar is not lines and shown[0].endswith(b"\n"):
            self._bar.print(b"\n")  # or the end of a longer bar would stay behind it
        lines.print(b"".join(shown))
        is_bar = shown[-1].endswith(b"\r") and lines.screen.isatty()
        self._bar = lines if is_bar else None


class _Lines:
    """What one rank writes to one screen, cut into whole lines."""

    def __init__(
        self, rank: int, prefix: bytes, screen: Any, *, is_filtered: bool
    ) -> None:
        self.rank, self.screen, self._prefix = rank, screen, prefix
        self._is_filtered = is_filtered
        self.rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are complete with this data, as they are to be shown."""
        data = self.rest + data
        lines = _LINE.findall(data)
        self.rest = data[sum(map(len, lines)) :]
        return [self._prefixed(line) for line in lines if self._is_shown(line)]

    def print(self, data: bytes) -> None:
        self.screen.write(data.decode(errors="replace"))
        self.screen.flush()

    def _is_shown(self, line: bytes) -> bool:
        return not (self._is_filtered and is_startup_noise(line.rstrip(b"\r\n")))

    def _prefixed(self, line: bytes) -> bytes:
        # A progress bar may begin with a carriage return, which is no line of its own.
        return line if line == b"\r" else self._prefix + line


def _read(descriptor: int) -> bytes | None:
    """What is there; empty at the end, and `None` where there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
