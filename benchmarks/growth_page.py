"""The sections of docs/growth.md that have a command of their own."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "growth.md"

# In the order of the page, behind what `make growth` writes.
SECTIONS = ("The start of a fit", "A lost rank, a lost host", "Many hosts")

_HEADING = re.compile(rf"\n## ({'|'.join(SECTIONS)})\n")


def write_section(heading: str, text: str) -> None:
    """Replace one of the sections; all others stay.

    Args:
        heading: One of `SECTIONS`.
        text: Without the heading.
    """
    first, found = _sections()
    _write(first, {**found, heading: text})


def write_first(text: str) -> None:
    """Replace what stands before the sections."""
    _write(text, _sections()[1])


def _sections() -> tuple[str, dict[str, str]]:
    first, *rest = _HEADING.split(PAGE.read_text())
    return first, dict(zip(rest[::2], rest[1::2], strict=True))


def _write(first: str, found: dict[str, str]) -> None:
    parts = [first.rstrip("\n")]
    for heading in SECTIONS:
        if heading in found:
            parts.append(f"## {heading}\n\n" + found[heading].strip("\n"))
    PAGE.write_text("\n\n".join(parts) + "\n")


def spread(values: Sequence[float]) -> str:
    """The median, and the smallest and largest of several values."""
    middle = f"{statistics.median(values):.1f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.1f} to {max(values):.1f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
