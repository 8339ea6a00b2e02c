"""Which rank failed first, and the message for the user."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_dist.launch.messages import telling_line
from keras_dist.launch.monitor.rank_ranges import ranges

_KIB_PER_MIB = 1024

# Of more ranks, those with the same outcome have one line.
_MOST_LINES = 16

# The error with which `checkpoint/saver.py` ends a rank that was asked to end.
_SAVED = "SavedExit"


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
        is_saved: Whether it was asked to end by SIGTERM, and all ranks have saved.
    """

    rank: int
    time: float
    code: int
    summary: str
    text: str
    is_secondary: bool
    is_saved: bool = False


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
    # A rank that has written its report may still run, or be ended before its exit.
    code = report.get("code", code)
    if report:
        return Failure(
            rank=rank,
            time=report["time"],
            code=code,
            summary=telling_line(report["kind"], report["message"]),
            text=report["text"],
            is_secondary=report["is_secondary"],
            is_saved=report["kind"] == _SAVED,
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
    failures: Sequence[Failure],
    positions: Mapping[int, str],
    *,
    num_ranks: int,
    hosts: Mapping[int, str] | None = None,
    unknown: Collection[int] = (),
) -> str:
    """The message for the user: the first failure, and a line for each other rank.

    Args:
        failures: The failures, sorted by `first_of`; at least one.
        positions: The position of each rank in words, as of `Ranks.where`. Ranks that
            have ended with exit code 0 are left out.
        num_ranks: Number of ranks.
        hosts: The host of each rank if there are several.
        unknown: Ranks of hosts that have sent no report.
    """
    first = failures[0]
    if all(failure.is_saved or failure.is_secondary for failure in failures) and (
        first.is_saved
    ):
        return (
            "keras-dist: the ranks were asked to end by SIGTERM, and have saved. "
            "The same command goes on from there."
        )
    where = {rank: f" on {host}" for rank, host in (hosts or {}).items()}
    named = f"{first.rank}{where.get(first.rank, '')}"
    position = positions.get(first.rank, "and it is not known where")
    lines = [f"keras-dist: rank {named} failed first, {position}."]
    lines += [first.text.rstrip()] if first.text else []
    lines += [f"Rank {named}: {first.summary}"]
    others = [rank for rank in range(num_ranks) if rank != first.rank]
    return "\n".join(lines + _outcomes(others, failures, positions, where, unknown))


def explain_lost(
    message: str,
    failures: Sequence[Failure],
    positions: Mapping[int, str],
    *,
    hosts: Mapping[int, str],
    unknown: Collection[int],
) -> str:
    """The message for the user if the cause is a host, and not a rank.

    Args:
        message: What happened to the host.
        failures: The failures of the ranks of other hosts.
        positions: As of `explain`.
        hosts: The host of each rank.
        unknown: Ranks of hosts that have sent no report.
    """
    where = {rank: f" on {host}" for rank, host in hosts.items()}
    known = sorted(set(hosts) - set(unknown))
    lines = _outcomes(known, failures, positions, where, ())
    return "\n".join([f"keras-dist: {message}", *lines])


def _outcomes(
    ranks: Sequence[int],
    failures: Sequence[Failure],
    positions: Mapping[int, str],
    where: Mapping[int, str],
    unknown: Collection[int],
) -> list[str]:
    """A line for each of these ranks: where it was, and how it ended."""
    summaries = {failure.rank: failure.summary for failure in failures}
    without_report = set(unknown)
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        if rank in without_report:
            outcome = ": its host has sent no report."
        elif rank not in positions:
            outcome = " had ended already, with exit code 0."
        else:
            outcome = f" was {positions[rank]}: {summaries.get(rank, 'ended with it')}"
        alike.setdefault(outcome, []).append(rank)
    if len(ranks) > _MOST_LINES:
        return [_line(own, outcome, where) for outcome, own in alike.items()]
    pairs = sorted((rank, text) for text, own in alike.items() for rank in own)
    return [_line([rank], outcome, where) for rank, outcome in pairs]


def _line(ranks: Sequence[int], outcome: str, where: Mapping[int, str]) -> str:
    """One line for ranks with the same outcome."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}{where.get(ranks[0], '')}{outcome}"
    hosts = {where.get(rank, "") for rank in ranks}
    named = f" on {len(hosts)} hosts" if len(hosts) > 1 else hosts.pop()
    many = re.sub("^ was", " were", outcome).replace(
        ": its host has", ": their hosts have"
    )
    return f"Ranks {ranges(ranks)}{named}{many}"


def print_message(text: str) -> None:
    """Print a message of the launcher, as long as somebody reads standard error.

    A thread that ended here would leave the other hosts waiting.
    """
    with contextlib.suppress(OSError, ValueError):  # the screen was closed
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
