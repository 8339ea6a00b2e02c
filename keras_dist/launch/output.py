"""Pass on the output of the ranks: to the screen, or to one file for each rank.

The ranks' output ends by itself if it cannot be written, and the job goes on.
"""

import contextlib
import os
import re
import select
import selectors
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import Full, Queue
from typing import IO, Any

_CHUNK = 1 << 16

# The most bytes that wait for the end of their line. A longer line is passed on in
# pieces, so that neither the memory nor the time for a chunk depends on its length.
_LONGEST = 1 << 14

# The most chunks that wait for a reader of the screen, once the ranks have to end; and
# seconds to wait for one: after output, and at the end of a job that was stopped.
_MOST_WAITING, _TICK, _LEAVE_SECONDS = 1 << 9, 0.1, 2.0

# A line, or one state of a progress bar, which ends with a carriage return; or carriage
# returns alone; or a part of a line, at the end.
_LINE = re.compile(rb"\r+(?!\n)|[^\r\n]*+(?:\r?\n|\r)|[^\r\n]++\Z")

# A warning of Python, Keras or TensorFlow, with its line of code; and how long one of
# another rank waits for the same of the first rank, in seconds.
_WARNING = re.compile(rb"(?m)^[^\r\n]*(?i:warning:).*\n(?:  .*\n)?")
_HOLD_SECONDS = 2.0

# What TensorFlow writes as it is imported, whatever its level of logging.
_ROUTINE = re.compile(rb"I0000 00:00:|WARNING: All log messages before absl::Init")


class Screen:
    """Standard output and standard error, to which a thread writes.

    It alone waits while nobody reads them (`| less`, Ctrl-S), so that the launcher
    answers signals. One that cannot be written is closed, and a line says so.
    """

    def __init__(self) -> None:
        self._pieces: Queue[tuple[int, bytes]] = Queue(_MOST_WAITING)  # to be written
        self._closed: set[int] = set()
        # Is started when it is needed.
        self._thread = threading.Thread(target=self._work, daemon=True)

    def write(self, stream: Any, data: bytes) -> None:
        """Let the thread write to `sys.stdout` or `sys.stderr`."""
        # There is no number if it was closed: `>&-`.
        with contextlib.suppress(AttributeError, ValueError, Full):
            self._pieces.put_nowait((stream.fileno(), data))
            if self._thread.ident is None:
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        with (done := self._pieces.all_tasks_done):
            return done.wait_for(lambda: not self._pieces.unfinished_tasks, seconds)

    def leave(self, stopped: Sequence[int]) -> None:
        """Wait until all is written; for a while if the launcher was stopped."""
        end = None
        while not self.wait(_TICK) and (end is None or time.monotonic() < end):
            if stopped:
                end = end or time.monotonic() + _LEAVE_SECONDS

    def _work(self) -> None:
        while True:
            number, data = self._pieces.get()
            try:
                if number not in self._closed:
                    _write_all(number, data)
            except OSError as error:
                self._closed.add(number)
                name = "standard error" if number == 2 else "standard output"
                _print_loss(f"{name} ({os.readlink(f'/proc/self/fd/{number}')})", error)
            self._pieces.task_done()


SCREEN = Screen()  # of this process


def print_message(text: str) -> None:
    """Print a message of the launcher to standard error."""
    SCREEN.write(sys.stderr, f"{text}\n".encode(errors="replace"))


def _print_loss(name: str, error: OSError) -> None:
    print_message(
        f"keras-dist: {name} cannot be written, and the job goes on without it. "
        f"Received: {error}"
    )


def _write_all(number: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:  # as the program that has started this one wants
            select.select([], [number], [])


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
        # Warnings that the first rank has shown; and those of others, with the times
        # until which they wait for the same one there.
        self._warnings: set[bytes] = set()
        self._held: deque[tuple[float, _Lines, bytes]] = deque()
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

    def pass_on(self, seconds: float, *, holds: bool = True) -> bool:
        """Wait for output, at most so long, and pass it on; whether there was any.

        Args:
            seconds: How long to wait.
            holds: Whether output is left in the pipes while nobody reads the screen, so
                that the ranks wait, too. Else what is too much is lost.
        """
        is_any = False
        if holds and not SCREEN.wait(seconds):
            return False
        for key, _ in self._selector.select(seconds):
            if data := os.read(key.fd, _CHUNK):
                is_any = True
                self._write(key.data, data)
            else:
                self._finish(key)
        self._release(time.monotonic())
        SCREEN.wait(_TICK)
        return is_any

    def close(self) -> None:
        """Pass on the rest, also of the ranks' children, and close pipes and files."""
        while self.pass_on(0, holds=False):
            pass
        for key in list(self._selector.get_map().values()):
            self._finish(key)
        self._release()
        self._selector.close()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _finish(self, key: Any) -> None:
        if key.data.rest or key.data.is_in_line:  # a line has begun
            self._show(key.data, b"\n")
        self._selector.unregister(key.fileobj)
        key.fileobj.close()

    def _write(self, lines: "_Lines", data: bytes) -> None:
        if self._folder is not None:
            if file := self._files.get(lines.rank):
                try:
                    _write_all(file.fileno(), data)
                except OSError as error:
                    _print_loss(file.name, error)
                    del self._files[lines.rank]
            if lines.rank:
                return
        self._show(lines, data)

    def _show(self, lines: "_Lines", data: bytes) -> None:
        data = lines.take_lines(data)
        found = _WARNING.findall(data) if b"warning:" in data.lower() else []
        if not lines.rank:
            self._warnings.update(found)
        elif found and not lines.is_in_line:
            end = time.monotonic() + _HOLD_SECONDS
            self._held.extend((end, lines, text) for text in found)
            data = _WARNING.sub(b"", data)
        self._print(lines, data)

    def _release(self, now: float = float("inf")) -> None:
        """Show warnings that have waited, and that the first rank has not shown."""
        while self._held and self._held[0][0] < now:
            _, lines, text = self._held.popleft()
            if text not in self._warnings:
                self._print(lines, text)

    def _print(self, lines: "_Lines", data: bytes) -> None:
        if shown := b"".join(map(lines.add_prefix, _LINE.findall(data))):
            if self._bar is not None and self._bar.rank != lines.rank:
                SCREEN.write(self._bar.screen, b"\n")
            SCREEN.write(lines.screen, shown)
            self._bar = lines if shown.endswith(b"\r") else None


class _Lines:
    """The output of one rank to one stream, split into lines."""

    def __init__(self, rank: int, prefix: bytes, screen: Any) -> None:
        self.rank, self.screen, self._prefix = rank, screen, prefix
        self.rest = b""
        self.is_in_line = False  # a part of the current line is shown

    def take_lines(self, data: bytes) -> bytes:
        """Add data; return what can be shown now: lines, or a part of a long one."""
        data = self.rest + data
        # A carriage return at the end may be followed by a newline.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if len(data) - end > _LONGEST:
            end = len(data.removesuffix(b"\r"))
        self.rest = data[end:]
        return data[:end]

    def add_prefix(self, piece: bytes) -> bytes:
        """Return a line, or a part of a long one, as the screen shows it."""
        was_in_line = self.is_in_line
        if not was_in_line and _ROUTINE.match(piece):
            return b""
        self.is_in_line = not piece.endswith((b"\n", b"\r"))
        # A progress bar begins with a carriage return, and what it takes back, which is
        # no line.
        has_prefix = not was_in_line and piece.strip(b"\b\r")
        return self._prefix + piece if has_prefix else piece


def _open_log(path: Path) -> IO[bytes]:
    """Open the log file of a rank; a job that is restarted appends to it.

    Raises:
        OSError: If it cannot be opened, or is a link.
    """
    # Another account may have put a link there, to a file of this user.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(  # noqa: SIM115
            path, "ab", buffering=0, opener=lambda *_: os.open(path, flags, 0o666)
        )
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        raise OSError(f"no file, but a pipe or a device: {str(path)!r}")
    except OSError as error:
        raise OSError(
            f"The log of a rank cannot be written. Received: {error}. It must be a "
            "file, and no link: remove it, or pass another `--log-dir`."
        ) from error
