"""Pass on the output of the ranks: to the screen, or to one file for each rank."""

import contextlib
import os
import re
import selectors
import sys
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 16

# The most bytes that wait for the end of their line. A longer line is passed on in
# pieces, so that neither the memory nor the time for a chunk depends on its length.
_LONGEST = 1 << 14

# A line, or one state of a progress bar, which ends with a carriage return; or carriage
# returns alone. It is applied to whole lines: with a beginning of a line at the end it
# would look for the end from each of its bytes.
_LINE = re.compile(rb"\r+(?!\n)|[^\r\n]*(?:\r?\n|\r)")

# What TensorFlow writes as it is imported, whatever its level of logging.
_ROUTINE = re.compile(rb"I0000 00:00:|WARNING: All log messages before absl::Init")


class Output:
    """Passes on the output of the ranks.

    Several ranks write to one screen, so a line, or a state of a progress bar, is shown
    when it is complete, or long. Lines of the first rank stay what they are; lines of
    rank K begin with `[K] `.

    Args:
        folder: Folder for one file for each rank; the screen then shows only the first
            rank. By default the screen shows all ranks.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        # Whose progress bar is the last line of the screen.
        self._bar: _Lines | None = None
        self._folder = None if folder is None else Path(folder)
        self._files: dict[int, IO[bytes]] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, rank: int, stdout: Any, stderr: Any) -> None:
        """Read from the pipes of a rank."""
        if self._folder is not None:
            self._files[rank] = _open_log(self._folder / f"rank.{rank}.log")
        prefix = f"[{rank}] ".encode() if rank else b""
        for pipe, screen in ((stdout, sys.stdout), (stderr, sys.stderr)):
            lines = _Lines(rank, prefix, screen)
            self._selector.register(pipe, selectors.EVENT_READ, lines)

    def pass_on(self, seconds: float) -> bool:
        """Wait for output, at most so long, and pass it on; whether there was any."""
        is_any = False
        for key, _ in self._selector.select(seconds):
            if data := os.read(key.fd, _CHUNK):
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

    def _finish(self, key: Any) -> None:
        if key.data.rest or key.data.is_in_line:  # a line has begun
            self._show(key.data, b"\n")
        self._selector.unregister(key.fileobj)
        key.fileobj.close()

    def _write(self, lines: "_Lines", data: bytes) -> None:
        if self._folder is not None:
            self._files[lines.rank].write(data)
            if lines.rank:
                return
        self._show(lines, data)

    def _show(self, lines: "_Lines", data: bytes) -> None:
        if shown := lines.add(data):
            with contextlib.suppress(ValueError):  # the screen was closed
                if self._bar is not None and self._bar.rank != lines.rank:
                    self._bar.print(b"\n")
                lines.print(shown)
                self._bar = lines if shown.endswith(b"\r") else None


class _Lines:
    """The output of one rank to one stream, split into lines."""

    def __init__(self, rank: int, prefix: bytes, screen: Any) -> None:
        self.rank, self._screen, self._prefix = rank, screen, prefix
        self.rest = b""
        self.is_in_line = False  # a part of the current line is shown

    def add(self, data: bytes) -> bytes:
        """Add data; return what can be shown now: lines, or a part of a long one."""
        data = self.rest + data
        # A carriage return at the end may be followed by a newline.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        pieces, self.rest = _LINE.findall(data[:end]), data[end:]
        if len(self.rest) > _LONGEST:
            pieces.append(self.rest.removesuffix(b"\r"))
            self.rest = self.rest[len(pieces[-1]) :]
        return b"".join(map(self._add_prefix, pieces))

    def _add_prefix(self, piece: bytes) -> bytes:
        was_in_line = self.is_in_line
        if not was_in_line and _ROUTINE.match(piece):
            return b""
        self.is_in_line = not piece.endswith((b"\n", b"\r"))
        # A progress bar begins with a carriage return, and what it takes back, which is
        # no line.
        has_prefix = not was_in_line and piece.strip(b"\b\r")
        return self._prefix + piece if has_prefix else piece

    def print(self, data: bytes) -> None:
        if self._screen is None:  # closed when the launcher was started: `>&-`
            return
        self._screen.flush()
        self._screen.buffer.write(data)  # not as text, which a part of one is not
        self._screen.flush()


def _open_log(path: Path) -> IO[bytes]:
    """Open the log file of a rank; a job that is restarted appends to it.

    Raises:
        OSError: If it cannot be opened, or is a link.
    """
    # Another account may have put a link there, to a file of this user.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return open(os.open(path, flags, 0o666), "ab", buffering=0)
    except OSError as error:
        raise OSError(
            f"The log of a rank cannot be written. Received: {error}. It must be a "
            "file, and no link: remove it, or pass another `--log-dir`."
        ) from error
