"""Pass on the output of the ranks: to the screen, or to one file for each rank."""

import contextlib
import os
import re
import selectors
import sys
from pathlib import Path
from typing import IO, Any

from keras_dist.launch.startup_noise import is_startup_noise, is_verbose

_CHUNK = 1 << 16

# A line, or one state of a progress bar, which ends with a carriage return. The next
# byte decides whether a carriage return is part of the end of a line.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


class Output:
    """Passes on the output of the ranks.

    Several ranks write to one screen, so a line, or a state of a progress bar, is shown
    when it is complete. TensorFlow's start-up lines on standard error are left out
    unless `KERAS_DIST_VERBOSE=1` is set (see `startup_noise`); a file has all lines.

    Args:
        size: The number of ranks; if there are several, each line begins with `[rank]`.
        folder: Folder for one file for each rank; the screen then shows only the first
            rank. By default the screen shows all ranks.
        is_of_agents: Whether agents on other hosts have left out these lines already.
    """

    def __init__(
        self,
        size: int,
        folder: str | os.PathLike[str] | None,
        *,
        is_of_agents: bool = False,
    ) -> None:
        self._size = size
        # What is noise on one host may be an error on another one.
        self._shows_all = is_of_agents or is_verbose()
        self._selector = selectors.DefaultSelector()
        # The rank whose progress bar is the last line of the terminal.
        self._bar: _Lines | None = None
        self._folder = None if folder is None else Path(folder)
        self._files: dict[int, IO[bytes]] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, rank: int, stdout: Any, stderr: Any) -> None:
        """Read from the pipes of a rank."""
        if self._folder is not None:
            # Append, so that the file has all runs of a job that is restarted.
            path = self._folder / f"rank.{rank}.log"
            self._files[rank] = open(path, "ab", buffering=0)  # noqa: SIM115
        for pipe, screen in ((stdout, sys.stdout), (stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            is_filtered = pipe is stderr and not self._shows_all
            lines = _Lines(rank, self._prefix(rank), screen, is_filtered=is_filtered)
            self._selector.register(pipe, selectors.EVENT_READ, lines)

    def pass_on(self, seconds: float) -> bool:
        """Wait for output, at most so long, and pass it on; whether there was any."""
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
        """Pass on the rest, also of the ranks' children, and close pipes and files."""
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
            self._bar.print(b"\n")  # or the end of a longer bar would stay visible
        lines.print(b"".join(shown))
        is_bar = shown[-1].endswith(b"\r") and lines.screen.isatty()
        self._bar = lines if is_bar else None


class _Lines:
    """The output of one rank to one stream, split into lines."""

    def __init__(
        self, rank: int, prefix: bytes, screen: Any, *, is_filtered: bool
    ) -> None:
        self.rank, self.screen, self._prefix = rank, screen, prefix
        self._is_filtered = is_filtered
        self.rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Add data; return the lines that are complete now, with their prefix."""
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
        # A progress bar may begin with a carriage return, which is not a line.
        return line if line == b"\r" else self._prefix + line


def _read(descriptor: int) -> bytes | None:
    """The available data: empty at the end, `None` if there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
