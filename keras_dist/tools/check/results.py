"""The outcome of one check, and how a rank passes it to the command."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from keras_dist.launch.hosts import ranges

# A warning is a check that passed, but deserves a look.
Status = Literal["ok", "failed", "warning", "untried"]

# The beginning of a line of output that is a report.
_MARK = "@keras-dist-check@ "


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Args:
        name: Name of the check.
        status: The outcome.
        seen: What was seen, in words.
        cure: What to do; empty if nothing.
        data: Numbers and facts, for `--json`.
    """

    name: str
    status: Status
    seen: str
    cure: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the line that a rank prints for the command."""
        return _MARK + json.dumps(dataclasses.asdict(self))


def parse_line(line: str) -> Result | None:
    """Parse a line of output; `None` if it reports no result.

    >>> parse_line("[1] " + Result("devices", "ok", "CPU").line()).seen
    'CPU'
    >>> parse_line("[1] loss: 0.25") is None
    True
    """
    _, mark, text = line.partition(_MARK)
    return Result(**json.loads(text)) if mark else None


def by_value(values: Sequence[Any], hosts: Sequence[str]) -> str:
    """Say which ranks, on which hosts, have which value.

    >>> by_value(["2.21.0", "2.21.0", "2.20.0"], ["a", "a", "b"])
    '2.21.0 on ranks 0, 1 (a), 2.20.0 on rank 2 (b)'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{text} on {name_ranks(ranks[text], hosts)}" for text in ranks)


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks and their hosts.

    >>> name_ranks([1, 2], ["a", "b", "b"]), name_ranks([0], ["localhost"])
    ('ranks 1, 2 (b)', 'rank 0')
    """
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    where = "" if len(set(hosts)) == 1 else f" ({', '.join(names)})"
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"
