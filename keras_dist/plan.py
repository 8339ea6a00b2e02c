"""The plan: every decision about a fit, in lines that are printed as a box."""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

_WIDTH = 76


@dataclass(frozen=True)
class Rows:
    """The rows and steps of the training or the validation data.

    Args:
        kind: The type of the data and how it is sharded, in words.
        batch_size: Rows in a batch of one rank; `None` if the data decides it.
        total: Rows of all ranks; `None` if unknown.
        is_by_row: Whether the data is sharded by row.
        steps_before: Steps of an epoch on one process; `None` if unknown.
        steps: Steps of an epoch on each rank; `None` if unknown.
        rule: The rule by which `steps` follows from a number that the user gave, or "".
        is_global: Whether `batch_size` is the batch of all ranks together.
    """

    kind: str
    batch_size: int | None = None
    total: int | None = None
    is_by_row: bool = False
    steps_before: int | None = None
    steps: int | None = None
    rule: str = ""
    is_global: bool = False


def draw_box(title: str, lines: Iterable[tuple[str, str]]) -> str:
    """Draw lines, which are pairs of a label and a text, in a box."""
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
    for label, text in lines:
        table.add_row(Text(label), Text(text, overflow="fold"))
    box = Panel(table, title=Text(title), title_align="left", box=ROUNDED)
    out = io.StringIO()
    Console(file=out, width=_WIDTH, force_terminal=False).print(box)
    return out.getvalue().rstrip("\n")


def describe_data(
    training: Rows, validation: Rows | None, size: int
) -> list[tuple[str, str]]:
    """Describe batches, rows and steps, before and after they are divided.

    >>> describe_data(Rows("arrays", 96, 960, steps=10, is_global=True), None, 5)[:2]
    [('batch', '96 global: 20 + 4 × 19 rows'), ('data', 'arrays')]
    """
    lines = [("batch", _describe_batch(training, size)), ("data", training.kind)]
    for label, text in (
        ("rows", _describe_rows(training, size)),
        ("steps", _describe_steps(training, "per epoch")),
    ):
        lines += [(label, text)] if text else []
    if validation is not None:
        # On one line: no row is left out.
        steps = _describe_steps(validation, "steps")
        text = ", ".join(filter(None, (_describe_rows(validation, size), steps)))
        lines.append(("validation", ": ".join(filter(None, (validation.kind, text)))))
    return lines


def _describe_batch(rows: Rows, size: int) -> str:
    batch = rows.batch_size
    if batch is None:
        whose = "shared by all ranks" if rows.is_global else "per rank"
        return f"as the data comes, {whose}"
    if rows.is_global:
        least, more = divmod(batch, size)
        shares = [(more, least + 1), (size - more, least)]
        shown = [f"{n} × {share:,}".removeprefix("1 × ") for n, share in shares if n]
        return f"{batch:,} global: {' + '.join(shown)} rows"
    per_rank = f" per rank, {batch * size:,} global"
    return f"{batch:,} rows" + per_rank * (size > 1)


def _describe_rows(rows: Rows, size: int) -> str:
    if rows.total is None or not rows.is_by_row or rows.is_global:
        return "" if rows.total is None else f"{rows.total:,}"
    low, high = rows.total // size, math.ceil(rows.total / size)
    each = f"{low:,}" if low == high else f"{low:,} or {high:,}"
    return f"{rows.total:,} → {each} per rank"


def _describe_steps(rows: Rows, unit: str) -> str:
    if rows.steps is None:
        return ""
    text = f"{rows.steps:,} {unit}"
    if rows.steps_before in (None, rows.steps):
        return text
    rule = f" (steps scaled: {rows.rule})" if rows.rule == "divide" else ""
    return f"{rows.steps_before:,} → {text}{rule}"
