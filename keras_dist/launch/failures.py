"""Which rank failed first, and the message for the user."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KIB_PER_MIB = 1024


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Args:
        rank: The rank.
        time: Time of its error, or of its end if it has no error; as of `time.time`.
        code: Its exit code; 128 + the number of the signal that ended it.
        summary: One line that says what happened.
        text: Its traceback, or the stacks of a crash; empty if there are none.
        is_secondary: Whether the cause is on another rank.
    """

    rank: int
    time: float
    code: int
    summary: str
    text: str
    is_secondary: bool


def failure_of(
    rank: int,
    returncode: int | None,
    *,
    path: str | os.PathLike[str],
    ended_at: float | None,
    memory: int,
) -> Failure | None:
    """The failure of a rank, or `None` if it has not failed.

    Args:
        rank: The rank.
        returncode: Return code of its process, as of `subprocess`; `None` while it
            runs.
        path: Beginning of the paths of its report files.
        ended_at: Time at which it ended; `None` while it runs.
        memory: The most memory that it used, in KiB.
    """
    report = _report_of(Path(f"{path}.json"))
    if not report and not returncode:
        return None
    code = 1 if not returncode else returncode if returncode > 0 else 128 - returncode
    if report:
        lines = report["message"].strip().splitlines()
        return Failure(
            rank=rank,
            time=report["time"],
            code=code,
            summary=": ".join([report["kind"], *lines[:1]]),
            text=report["text"],
            is_secondary=report["is_secondary"],
        )
    return Failure(
        rank=rank,
        time=ended_at or 0.0,
        code=code,
        summary=_summary(returncode or 0, memory),
        text=_read(Path(f"{path}.crash")),
        is_secondary=False,
    )


def first_of(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures: by time, but those with their cause on another rank come last.

    >>> early = Failure(0, 1.0, 1, "lost connection", "", True)
    >>> late = Failure(1, 2.0, 3, "division by zero", "", False)
    >>> [failure.summary for failure in first_of([early, late])]
    ['division by zero', 'lost connection']
    """
    return sorted(failures, key=lambda failure: (failure.is_secondary, failure.time))


def explain(
    failures: Sequence[Failure], positions: Mapping[int, str], *, num_ranks: int
) -> str:
    """The message for the user: the first failure, and a line for each other rank.

    Args:
        failures: The failures, sorted by `first_of`; at least one.
        positions: The position of each rank in words, as of `Ranks.where`. Ranks that
            have ended with exit code 0 are left out.
        num_ranks: Number of ranks.
    """
    first = failures[0]
    others = {failure.rank: failure.summary for failure in failures[1:]}
    lines = [f"keras-dist: rank {first.rank} failed first, {positions[first.rank]}."]
    lines += [first.text.rstrip()] if first.text else []
    lines += [f"Rank {first.rank}: {first.summary}"]
    for rank in range(num_ranks):
        if rank not in positions:
            lines.append(f"Rank {rank} had ended already, with exit code 0.")
        elif rank != first.rank:
            outcome = others.get(rank, "ended with it")
            lines.append(f"Rank {rank} was {positions[rank]}: {outcome}")
    return "\n".join(lines)


def print_message(text: str) -> None:
    """Print a message of the launcher."""
    print(text, file=sys.stderr, flush=True)


def _summary(returncode: int, memory: int) -> str:
    """How a rank ended that wrote no report."""
    if returncode >= 0:
        return f"ended with exit code {returncode}, and without a Python error"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    text = f"was ended by {name}"
    if returncode == -signal.SIGKILL:
        text += (
            ", as the kernel does when memory runs out (dmesg then says so); "
            f"it used at most {memory // _KIB_PER_MIB:,} MiB"
        )
    return text


def _report_of(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
