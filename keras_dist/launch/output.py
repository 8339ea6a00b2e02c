"""What the ranks print: on the screen line by line, or in a file a rank."""

import contextlib
import os
import selectors
import sys
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 16


class Output:
    """Passes on what the ranks print.

    Args:
        size: How many ranks there are; more than one are told apart by `[rank]`.
        folder: Where to write a file a rank; the screen then shows the first rank
            alone. By default all ranks share the screen.
    """

    def __init__(self, size: int, folder: str | os.PathLike[str] | None) -> None:
        self._size = size
        self._selector = selectors.DefaultSelector()
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
            lines = _Lines(rank, self._prefix(rank), screen)
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
        with contextlib.suppress(ValueError):  # the screen was closed
            lines.pass_on(data)


class _Lines:
    """Puts whole lines on a screen that several write to."""

    def __init__(self, rank: int, prefix: bytes, screen: Any) -> None:
        self.rank, self._prefix, self._screen = rank, prefix, screen
        self.rest = b""

    def pass_on(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        whole = b"".join(self._prefix + line + b"\n" for line in lines)
        self._screen.write(whole.decode(errors="replace"))
        self._screen.flush()


def _read(descriptor: int) -> bytes | None:
    """What is there; empty at the end, and `None` where there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
