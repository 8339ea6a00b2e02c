"""The lines that `keras-dist check` shows."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from keras_dist.tools.check.result import FAILED, OK, UNTRIED, WARNING, Result

# With Unicode, and without.
_SIGNS = {OK: "✔v", FAILED: "✘x", WARNING: "!!", UNTRIED: "–-"}
_ARROW = "→>"
_COLORS = {OK: "32", FAILED: "31", WARNING: "33", UNTRIED: "2"}

_NAME, _WIDEST = 13, 120
_WORDS = {
    OK: "holds",
    FAILED: "failed",
    WARNING: "to be looked at",
    UNTRIED: "not tried",
}


class Screen:
    """Shows results as they come, and what is running on a terminal.

    Args:
        out: Where to write.
        width: Columns; by default those of the terminal, at most 120.
    """

    def __init__(self, out: TextIO | None = None, width: int = 0) -> None:
        self._out = sys.stdout if out is None else out
        self._width = width or min(_WIDEST, shutil.get_terminal_size().columns)
        self._is_terminal = self._out.isatty()
        self._has_color = self._is_terminal and not os.environ.get("NO_COLOR")
        self._group = ""
        self._is_plain = not _can_show("✔✘–→", self._out.encoding)
        self._running = 0

    def title(self, text: str) -> None:
        """Show the first line."""
        self._write(text)

    def running(self, text: str) -> None:
        """Show what is running now, on a terminal alone; the next line replaces it."""
        if self._is_terminal:
            self._clear()
            line = f"  … {text}"[: self._width - 1]
            self._running = len(line)
            self._out.write(line)
            self._out.flush()

    def show(self, result: Result) -> None:
        """Show a result, with its group above it if it is the first of it."""
        if result.group != self._group:
            self._group = result.group
            self._write(f"\n{result.group}")
        lines = lines_of(result, width=self._width, is_plain=self._is_plain)
        if self._has_color:
            sign = lines[0][2]
            color = f"\033[{_COLORS[result.status]}m{sign}\033[0m"
            lines[0] = f"  {color}{lines[0][3:]}"
        self._write("\n".join(lines))

    def summary(self, results: Sequence[Result]) -> None:
        """Show how many checks hold."""
        counts = [sum(r.status == status for r in results) for status in _WORDS]
        named = zip(_WORDS.values(), counts, strict=True)
        texts = [f"{count} {_plural(name, count)}" for name, count in named if count]
        self._write(f"\n{', '.join(texts)}")

    def _write(self, text: str) -> None:
        self._clear()
        self._out.write(text + "\n")
        self._out.flush()

    def _clear(self) -> None:
        if self._running:
            self._out.write("\r" + " " * self._running + "\r")
            self._running = 0


def lines_of(result: Result, *, width: int, is_plain: bool = False) -> list[str]:
    """The lines of one result, each at most so wide if its words allow it.

    >>> print(*lines_of(Result("devices", "memory", OK, "2 GiB free"), width=40))
      ✔ memory       2 GiB free
    """
    sign = _SIGNS[result.status][is_plain]
    indent = " " * (4 + _NAME)
    first = f"  {sign} {result.name:<{_NAME - 1}} "
    seen = result.seen or "–"
    lines: list[str] = []
    for paragraph in seen.splitlines():
        begin = indent if lines else first
        lines += _wrapped(paragraph, begin, indent, width)
    if result.cure and result.status != OK:
        arrow = f"{indent}{_ARROW[is_plain]} "
        lines += _wrapped(result.cure, arrow, indent + "  ", width)
    return [_ascii(line) if is_plain else line for line in lines]


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plural(word: str, count: int) -> str:
    return word.replace("holds", "hold") if count > 1 else word


def _can_show(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _ascii(line: str) -> str:
    known = {"–": "-", "×": "x", "µ": "u", "…": "...", "→": ">"}
    for mark, plain in known.items():
        line = line.replace(mark, plain)
    return line.encode("ascii", "replace").decode()
