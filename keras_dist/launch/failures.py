"""The end of each rank, and the message about the first failure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.launch.hosts import ranks_in_words
from keras_dist.launch.time_limits import TimeLimits

# Of more ranks, the others are counted alone.
_MOST_LINES = 16


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank, or its place when its host began to end all ranks.

    Args:
        rank: The rank.
        where: Where it was, in words.
        code: Its exit code, 128 + the number of a signal that ended it; `None` if it
            still ran when its host began to end all.
        time: Time of its error, or of its end; as of `time.time`.
        summary: One line that says how it failed, or that it left the others; empty if
            it did not.
        text: Its traceback, or the stacks of a crash.
        is_secondary: Whether another rank caused the error.
        is_saved: Whether it was asked to end by SIGTERM, and ended with the others.
    """

    rank: int
    where: str
    code: int | None = None
    time: float = 0.0
    summary: str = ""
    text: str = ""
    is_secondary: bool = False
    is_saved: bool = False


@dataclass(frozen=True)
class Report:
    """Results of one host's ranks, sent to the first host.

    Args:
        ends: The end of each rank, as of the time when the host began to end them.
        saved: Whether all ranks were asked to end, and ended together.
        error: Why no rank could be started; empty if they were.
        signal: The signal that the launcher has received; 0 for none.
    """

    ends: Sequence[RankEnd] = ()
    saved: bool = False
    error: str = ""
    signal: int = 0

    @property
    def is_finished(self) -> bool:
        """True if all ranks have ended by themselves, with exit code 0."""
        return not self.error and all(end.code == 0 for end in self.ends)


def parse_report(values: dict[str, Any]) -> Report:
    """Return the report that `asdict` has made to values of JSON."""
    return Report(**{**values, "ends": [RankEnd(**end) for end in values["ends"]]})


def describe_failure(
    reports: Sequence[Report | None], hosts: Sequence[tuple[str, Sequence[int]]]
) -> tuple[str, int]:
    """Return the message for the user, and the exit code, of a job that has failed.

    It is the first failure, with a line for each other rank.

    Args:
        reports: The report of each host; `None` if it was lost.
        hosts: Name and ranks of each host.
    """
    names = {rank: name for name, ranks in hosts for rank in ranks}
    ends = [end for report in reports if report for end in report.ends]
    failures = sorted(filter(lambda end: end.code, ends), key=lambda end: end.time)
    primary = [end for end in failures if not end.is_secondary]
    primary += [end for end in ends if end.code == 0 and end.summary]
    causes: list[str] = []
    for (name, ranks), report in zip(hosts, reports, strict=True):
        if report is None:
            seconds, lost = TimeLimits().lost, ranks_in_words(ranks)
            text = f"host {name} has not responded for {seconds:g} s ({lost})."
            causes.insert(0, text)
        elif report.error:
            where = f"no ranks could be run on {name}: " if len(hosts) > 1 else ""
            causes.append(where + report.error)

    def name_rank(end: RankEnd) -> str:
        return f"{end.rank} on {names[end.rank]}" if len(hosts) > 1 else f"{end.rank}"

    if primary and all(end.is_saved for end in primary):
        return (
            "keras-dist: the ranks were asked to end by SIGTERM, and ended together. "
            "The same command continues the training."
        ), primary[0].code or 1
    if causes and not (primary and failures):
        lines, code, first = [f"keras-dist: {causes.pop(0)}"], 1, None
    elif not failures:
        return "keras-dist: the job was ended.", 1
    else:
        first = (primary or failures)[0]
        code = first.code or failures[0].code or 1
        lines = [f"keras-dist: rank {name_rank(first)} failed first, {first.where}."]
        lines.append(first.text.rstrip())
    lines += [f"keras-dist: {cause}" for cause in causes]
    others = [end for end in sorted(ends, key=lambda e: e.rank) if end is not first]
    for end in others[:_MOST_LINES]:
        outcome = f"was {end.where}: {end.summary or 'ended with it'}"
        if end.code == 0 and not end.summary:
            outcome = "had ended already, with exit code 0."
        lines.append(f"Rank {name_rank(end)} {outcome}")
    if len(others) > _MOST_LINES:
        lines.append(f"And {len(others) - _MOST_LINES} more ranks.")
    return "\n".join(lines), code
