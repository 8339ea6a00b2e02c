"""What was seen by a check, and how a rank reports it to the command."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OK, FAILED, WARNING, UNTRIED = "ok", "failed", "warning", "untried"

# What a rank reports when a check begins. It is never the status of a result.
BEGUN = "begun"

# What a line of a rank begins with that is a report.
_MARK = "@keras-dist-check@ "


@dataclass(frozen=True)
class Result:
    """What one check has seen.

    Args:
        group: The group of the check, as "collectives".
        name: Its name, which no other check of the group has.
        status: `OK`, `FAILED`, `WARNING` (it holds, and is to be looked at) or
            `UNTRIED`; or `BEGUN`, of a report between rank and command.
        seen: What was seen, in words.
        cure: What to do about it; empty where nothing is to be done.
        data: Numbers and facts, for `--json`.
    """

    group: str
    name: str
    status: str
    seen: str
    cure: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Group and name."""
        return self.group, self.name

    def line(self) -> str:
        """The line that a rank prints for the command."""
        return _MARK + json.dumps(dataclasses.asdict(self))


def result_in(line: str) -> Result | None:
    """The result that a line of output reports; `None` if it is another line.

    >>> result_in("[1] " + Result("devices", "memory", OK, "2 GiB").line()).seen
    '2 GiB'
    >>> result_in("[1] loss: 0.25") is None
    True
    """
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        return Result(**json.loads(text))
    except (TypeError, ValueError):
        return None


def holds(results: list[Result]) -> bool:
    """Whether no check has failed, and at least one was tried."""
    states = {result.status for result in results}
    return FAILED not in states and bool(states - {UNTRIED})
