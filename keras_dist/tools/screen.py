"""What a command shows: lines, and on a terminal what is running, below them."""

import shutil
import sys
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

# Signs, and what takes their place where the encoding of the output lacks them.
_PLAIN = str.maketrans(
    {"✔": "v", "✘": "x", "–": "-", "→": ">", "×": "x", "µ": "u", "…": "..."}
)
_WIDEST = 120


class Screen:
    """Show lines, and below them what is running now.

    What is running is shown only on a terminal, where the next line replaces it. Leave
    the context, or the terminal's cursor stays hidden.

    Args:
        out: Where to write; by default standard output.
        width: Columns; by default the width of the terminal, at most 120.
    """

    def __init__(self, out: TextIO | None = None, width: int = 0) -> None:
        file = sys.stdout if out is None else out
        self.width = width or min(_WIDEST, shutil.get_terminal_size().columns)
        self.is_terminal = file.isatty()
        self._encoding = getattr(file, "encoding", None) or "utf-8"
        self._is_plain = not _can_encode("✔✘–→", self._encoding)
        self._console = Console(
            file=file, force_terminal=self.is_terminal, highlight=False
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def line(self, text: str, *, style: str = "", sign: int = -1) -> None:
        """Show text on lines of its own.

        Args:
            text: The text.
            style: Color of the sign, on a terminal that has colors.
            sign: Position of the sign in the text.
        """
        self._live.stop()
        shown = Text(self._encodable(text))
        if style and not self._console.no_color:
            shown.stylize(style, sign, sign + 1)
        self._console.print(shown, soft_wrap=True)

    def running(self, text: str) -> None:
        """Show on a terminal what is running now."""
        if self.is_terminal:
            self._live.start()
            shown = Text(self._encodable(text)[: self.width - 1], no_wrap=True)
            self._live.update(shown, refresh=True)

    def _encodable(self, text: str) -> str:
        text = text.translate(_PLAIN) if self._is_plain else text
        return text.encode(self._encoding, "replace").decode(self._encoding)


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
