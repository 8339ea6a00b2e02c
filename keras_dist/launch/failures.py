"""Which rank failed first, and what there is to say of it."""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MEMORY = 1024  # KiB in a MiB


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Args:
        rank: Which one.
        time: When, as `time.time`: of its error, or of its end where there is none.
        code: The exit code of a shell: 128 + the number of a signal.
        summary: In one line.
        text: Its traceback, or the stacks of a crash; empty where there are none.
        is_secondary: Whether its cause is on another rank.
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
    """The failure of a rank, or `None` where it has not failed.

    Args:
        rank: Which one.
        returncode: As `subprocess` says it; `None` while it runs.
        path: Beginning of the files in which it says why.
        ended_at: When it ended.
        memory: The most that it had, in KiB.
    """
    said = _said(Path(f"{path}.json"))
    if not said and not returncode:
        return None
    code = 1 if not returncode else returncode if returncode > 0 else 128 - returncode
    if said:
        lines = said["message"].strip().splitlines()
        return Failure(
            rank=rank,
            time=said["time"],
            code=code,
            summary=": ".join([said["kind"], *lines[:1]]),
            text=said["text"],
            is_secondary=said["is_secondary"],
        )
    return Failure(
        rank=rank,
        time=ended_at or 0.0,
        code=code,
        summary=_how(returncode or 0, memory),
        text=_read(Path(f"{path}.crash")),
        is_secondary=False,
    )


def first_of(failures: Sequence[Failure]) -> list[Failure]:
    """Failures in order: an error that is a rank's own before any that was heard of.

    >>> early = Failure(0, 1.0, 1, "agreed", "", True)
    >>> late = Failure(1, 2.0, 3, "own", "", False)
    >>> [failure.summary for failure in first_of([early, late])]
    ['own', 'agreed']
    """
    return sorted(failures, key=lambda failure: (failure.is_secondary, failure.time))


def explain(
    failures: Sequence[Failure], positions: Mapping[int, str], *, num_ranks: int
) -> str:
    """What the user reads: the first failure whole, and a line for each other rank.

    Args:
        failures: First first; at least one.
        positions: Where each rank is or was, but those that have ended well.
        num_ranks: How many there are.
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
    """Print for the user."""
    print(text, file=sys.stderr, flush=True)


def _how(returncode: int, memory: int) -> str:
    """How a rank ended that said nothing."""
    if returncode >= 0:
        return f"ended with exit code {returncode}, and without a Python error"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    said = f"was ended by {name}"
    if returncode == -signal.SIGKILL:
        said += (
            f", as the kernel ends a process when memory runs out (dmesg says so); it "
            f"had at most {memory // _MEMORY:,} MiB"
        )
    return said


def _said(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
