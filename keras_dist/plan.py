"""The plan: every decision about a fit as one frozen value, printed as a box."""

import io
import math
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
        rule: The rule by which `steps` was computed from a number that the user gave,
            or "".
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


@dataclass(frozen=True)
class Rate:
    """The learning rate of one optimizer, as text.

    Args:
        scaled: The rate with the full factor.
        change: The rate before and after scaling, and why.
        schedule: How a `LearningRateSchedule` is read; "" for a plain rate.
    """

    scaled: str
    change: str
    schedule: str = ""


@dataclass(frozen=True)
class Plan:
    """Every decision of one call of `dist_fit`, as plain data.

    `str(plan)` is the box that the first rank prints before the first step.

    Args:
        version: Version of keras_dist.
        size: Number of ranks.
        hosts: Number of hosts.
        device: Device of each rank, as text.
        transport: Transport of the collectives, as text.
        training: Rows and steps of the training data.
        validation: Rows and steps of the validation data, if there is any.
        rates: Learning rate of each optimizer.
        is_compiled: Whether the model is compiled by XLA.
        outputs: Name of each callback that writes files.
        resume: Where an interrupted epoch goes on, in words; "" without `resume`.
    """

    version: str
    size: int
    hosts: int
    device: str
    transport: str
    training: Rows
    validation: Rows | None
    rates: tuple[Rate, ...]
    is_compiled: bool
    outputs: tuple[str, ...]
    resume: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of the box, as pairs of a label and a text."""
        lines = [("ranks", self._ranks())]
        if self.size > 1:
            lines.append(("transport", self.transport))
        lines.append(("batch", self._batch()))
        lines.append(("data", self.training.kind))
        lines += _rows_lines("rows", self.training, self.size)
        lines += _steps_lines("steps", self.training, self.size)
        if self.validation is not None:
            lines += _validation_lines(self.validation, self.size)
        for rate in self.rates:
            texts = filter(None, (rate.change, rate.schedule))
            lines += [("learning rate", text) for text in texts]
        if self.resume:
            lines.append(("resume", self.resume))
        if self.is_compiled and self.size > 1:
            lines.append(
                ("XLA", "forward and backward, then update; averaging between")
            )
        if self.size > 1 and self.outputs:
            lines.append(("first rank", f"runs {', '.join(self.outputs)}"))
        return lines

    def __str__(self) -> str:
        table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2, 0, 0))
        for label, text in self.lines():
            table.add_row(Text(label), Text(text, overflow="fold"))
        title = Text(f"keras_dist {self.version}")
        box = Panel(table, title=title, title_align="left", box=ROUNDED)
        out = io.StringIO()
        Console(file=out, width=_WIDTH, force_terminal=False).print(box)
        return out.getvalue().rstrip("\n")

    @property
    def global_batch(self) -> int | None:
        """Rows of all ranks in a step; `None` if the data decides it."""
        batch, is_global = self.training.batch_size, self.training.is_global
        return batch if batch is None or is_global else batch * self.size

    def _batch(self) -> str:
        batch, size = self.training.batch_size, self.size
        if self.training.is_global:
            if batch is None:
                return "as the data comes, shared by all ranks"
            least, more = divmod(batch, size)
            shares = [(more, least + 1), (size - more, least)]
            shown = [
                f"{n} × {rows:,}" if n > 1 else f"{rows:,}" for n, rows in shares if n
            ]
            return f"{batch:,} global: {' + '.join(shown)} rows"
        if batch is None:
            return "as the data comes, per rank"
        per_rank = f" per rank, {batch * size:,} global"
        return f"{batch:,} rows" + per_rank * (size > 1)

    def _ranks(self) -> str:
        if self.size == 1:
            return f"1 (serial), {self.device}"
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return f"{self.size} on {hosts}, {self.device}"


def format_number(value: float) -> str:
    """Write a number with at most six significant digits, without trailing zeros.

    >>> [format_number(value) for value in (0.1, 2.0, 1e-05, 0.30000000000000004)]
    ['0.1', '2', '1e-05', '0.3']
    """
    return f"{value:.6g}"


def _rows_lines(label: str, rows: Rows, size: int) -> list[tuple[str, str]]:
    if rows.total is None:
        return []
    if rows.is_global or not rows.is_by_row:
        return [(label, f"{rows.total:,}")]
    low, high = rows.total // size, math.ceil(rows.total / size)
    each = f"{low:,}" if low == high else f"{low:,} or {high:,}"
    return [(label, f"{rows.total:,} → {each} per rank")]


def _steps_lines(label: str, rows: Rows, size: int) -> list[tuple[str, str]]:
    if rows.steps is None:
        return []
    rule = f" ({rows.rule})" if rows.rule else ""
    before = "" if rows.steps_before is None else f"{rows.steps_before:,} → "
    is_same = rows.is_global or size == 1
    if is_same and rows.steps_before in (None, rows.steps):
        before = ""
    return [(label, f"{before}{rows.steps:,} an epoch{rule}")]


def _validation_lines(rows: Rows, size: int) -> list[tuple[str, str]]:
    # On one line: no row is left out.
    details = _rows_lines("", rows, size) + _steps_lines("", rows, size)
    text = ", ".join(text for _, text in details).replace("an epoch", "steps")
    text = text.replace(" per rank", "")
    return [("validation", f"{rows.kind}" + (f": {text}" if text else ""))]
