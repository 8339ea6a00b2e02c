"""How ranks fail, how a host reports it, and the message about the first cause."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from keras_dist.launch.hosts import ranges

# Seconds of silence after which a host is lost. A shorter outage does no harm: what
# Gloo has sent waits in the kernel.
LOST_SECONDS = 15.0

_KIB_PER_MIB = 1024

# Of more ranks, those with the same outcome have one line.
_MOST_LINES = 16

# The error with which `checkpoint/saver.py` ends a rank that was asked to end.
_SAVED = "SavedExit"

# Lines by which Keras, AutoGraph and TensorFlow say where they were, before a message;
# code is indented further than a message is.
_WHERE = re.compile(
    r"\s*$| {5}|\s*File \"|(?:\w+: )?(?:in user code:|Exception encountered when "
    r"|Could not automatically infer .* Error encountered:|Graph execution error:)"
    r"|Detected at node |Node: |<stack traces unavailable>|\d+ root error\(s\) found"
)
# Colors, and what TensorFlow puts around a message.
_MARKS = re.compile(
    r"\x1b\[[\d;]*m|\{\{function_node [^}]*\}\} ?| \[Op:\w+\](?: name: ?)?$"
    r"|^ *\(0\)\s*(?:\w+:)?\s*",
    re.MULTILINE,
)


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


def find_failure(
    rank: int,
    returncode: int | None,
    *,
    path: str | os.PathLike[str],
    ended: tuple[float, int],
) -> Failure | None:
    """Return the failure of a rank, or `None` if it has not failed.

    Args:
        rank: The rank.
        returncode: Return code of its process, as of `subprocess`; `None` while it
            runs.
        path: Beginning of the paths of its report files.
        ended: When it ended, and the most memory that it used, in KiB.
    """
    # A rank that has written its report may still run, or be ended before its exit.
    if report := _read_report(f"{path}.json"):
        return Failure(
            rank=rank,
            time=report["time"],
            code=report["code"],
            summary=telling_line(report["kind"], report["message"]),
            text=report["text"],
            is_secondary=report["is_secondary"],
            is_saved=report["kind"] == _SAVED,
        )
    if not returncode:
        return None
    return Failure(
        rank=rank,
        time=ended[0],
        code=returncode if returncode > 0 else 128 - returncode,
        summary=_describe_end(returncode, ended[1]),
        text=_read(f"{path}.crash"),
        is_secondary=False,
    )


def sort_failures(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures: by time, but those with their cause on another rank come last.

    >>> early = Failure(0, 1.0, 1, "lost connection", "", True)
    >>> late = Failure(1, 2.0, 3, "division by zero", "", False)
    >>> [failure.summary for failure in sort_failures([early, late])]
    ['division by zero', 'lost connection']
    """
    return sorted(failures, key=lambda failure: (failure.is_secondary, failure.time))


@dataclass(frozen=True)
class Report:
    """How the ranks of one host have ended.

    Args:
        failures: The failures of ranks, the first one first.
        where: The position of each rank in words; see `Ranks.where`.
        saved: Whether all ranks were asked to end, and have saved.
        error: Why no rank could be started; empty if they were.
        finished: Whether all ranks have ended by themselves, with exit code 0.
        signal: The signal that the launcher has received; 0 for none.
    """

    failures: Sequence[Failure] = ()
    where: Mapping[int, str] = field(default_factory=dict)
    saved: bool = False
    error: str = ""
    finished: bool = False
    signal: int = 0

    def values(self) -> dict[str, Any]:
        """Return the report as values of JSON."""
        return asdict(self)


def parse_report(values: Mapping[str, Any]) -> Report:
    """Return the report that `Report.values` has made to values of JSON."""
    failures = [Failure(**failure) for failure in values["failures"]]
    where = {int(rank): text for rank, text in values["where"].items()}
    return Report(**{**values, "failures": failures, "where": where})


def verdict(
    reports: Sequence[Report],
    cause: str,
    *,
    hosts: Mapping[int, str],
    unknown: Collection[int],
) -> tuple[str, int]:
    """Return the message for the user, and the exit code, of a job that has failed.

    It is the first failure, with a line for each other rank.

    Args:
        reports: The reports that have come.
        cause: What happened to a host; empty for nothing. It counts if no rank was the
            first to fail, with exit code 1.
        hosts: The host of each rank; empty names if there is one host alone.
        unknown: Ranks of hosts that have sent no report.
    """
    failures = sort_failures(
        [failure for report in reports for failure in report.failures]
    )
    positions = {r: text for report in reports for r, text in report.where.items()}
    where = {rank: f" on {host}" for rank, host in hosts.items() if host}
    if cause and all(failure.is_secondary for failure in failures):
        lines, code = [f"keras-dist: {cause}"], 1
        others = sorted(set(hosts) - set(unknown))
    elif not failures:
        return "keras-dist: the job was ended.", 1
    elif all(each.is_saved or each.is_secondary for each in failures) and (
        failures[0].is_saved
    ):
        return (
            "keras-dist: the ranks were asked to end by SIGTERM, and have saved. "
            "The same command continues from there."
        ), failures[0].code
    else:
        lines, code = _describe_first(failures[0], positions, where), failures[0].code
        others = sorted(set(hosts) - {failures[0].rank})
    outcomes = _describe_others(others, failures, positions, where, unknown)
    return "\n".join([*lines, *outcomes]), code


def lost_text(host: str, ranks: Sequence[int]) -> str:
    """Return what is said of a host that sends no heartbeats."""
    named = ranks_in_words(ranks)
    return f"host {host} has not responded for {LOST_SECONDS:g} s ({named})."


def _describe_first(
    first: Failure, positions: Mapping[int, str], where: Mapping[int, str]
) -> list[str]:
    """Return the lines for the rank that failed first: where it was, and its error."""
    named = f"{first.rank}{where.get(first.rank, '')}"
    return [
        f"keras-dist: rank {named} failed first, {positions[first.rank]}.",
        *([first.text.rstrip()] if first.text else []),
        f"Rank {named}: {first.summary}",
    ]


def _describe_others(
    ranks: Sequence[int],
    failures: Sequence[Failure],
    positions: Mapping[int, str],
    where: Mapping[int, str],
    unknown: Collection[int],
) -> list[str]:
    """Return a line for each of these ranks: where it was, and how it ended."""
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
        return [_describe_alike(own, outcome, where) for outcome, own in alike.items()]
    pairs = sorted((rank, text) for text, own in alike.items() for rank in own)
    return [_describe_alike([rank], outcome, where) for rank, outcome in pairs]


def _describe_alike(
    ranks: Sequence[int], outcome: str, where: Mapping[int, str]
) -> str:
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


def _describe_end(returncode: int, memory: int) -> str:
    """Return how a rank ended that wrote no report."""
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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words.

    >>> ranks_in_words([1]), ranks_in_words([2, 3])
    ('rank 1', 'ranks 2, 3')
    """
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def telling_line(kind: str, message: str) -> str:
    """Name and message of an error in one line: the one that helps.

    Args:
        kind: Name of the error's class.
        message: Its message.

    >>> telling_line("ValueError", "in user code:\\n\\n    ValueError: No tea.\\n")
    'ValueError: No tea.'
    """
    text = _MARKS.sub("", message)
    head = text[: text.find(": ") + 2] if text.startswith("On rank ") else ""
    lines = text.removeprefix(head).splitlines()
    line = next((each.strip() for each in lines if not _WHERE.match(each)), "")
    line = head + line.removeprefix(f"{kind}: ")
    return f"{kind}: {line}" if line else kind


def _read_report(path: str) -> dict[str, Any]:
    try:
        report = json.loads(_read(path))
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
