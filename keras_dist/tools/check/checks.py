"""Checks: which there are, by stage, and how a rank tries and reports them.

Each stage is one launch of ranks, and one module with a function `run`, which tries the
checks of the stage in their order. Needs no TensorFlow.
"""

import argparse
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_dist.launch.hosts import ranges

OK, FAILED, WARNING, UNTRIED = "ok", "failed", "warning", "untried"

# What a rank reports when a check begins. It is never the status of a result.
BEGUN = "begun"

# The beginning of a line of output that is a report.
_MARK = "@keras-dist-check@ "

# With more ranks than these, only the first of each host reports.
_MOST = 256

# Outcome of a check: status, what was seen, what to do, and data.
Found = tuple[str, str, str, Mapping[str, Any]]


@dataclass(frozen=True)
class Stage:
    """A launch of ranks, and the checks that they try in this order.

    Args:
        name: Name of the stage and of its module.
        checks: Group and name of each check.
        seconds: Time limit of a launch. On a busy machine, most of it is the import of
            TensorFlow.
        has_package: Whether the ranks import the package, and so TensorFlow; else they
            are started as programs, so that everything may be missing.
        restarts: How often the ranks are restarted; see `run --restarts`.
        environment: Environment variables of the ranks.
    """

    name: str
    checks: Sequence[tuple[str, str]]
    seconds: float = 300.0
    has_package: bool = True
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def _checks(group: str, names: str) -> list[tuple[str, str]]:
    return [(group, name) for name in names.split()]


# Without it nothing that follows can be tried.
CONNECT = ("environment", "connect")

ENVIRONMENT = Stage(
    "environment",
    _checks(
        "environment",
        "start versions Horovod CUDA code system network names clocks",
    ),
    has_package=False,
)
DEVICES = Stage("devices", [CONNECT, *_checks("devices", "device memory cores matmul")])
COLLECTIVES = Stage(
    "collectives",
    _checks("collectives", "transport sum broadcast gather latency bandwidth"),
)
TRUTH = Stage("truth", _checks("truth", "gradient CNN Embedding float16 XLA"))
RESUME = Stage("resume", _checks("resume", "folder shared resume"), restarts=1)
SPEED = Stage(
    "speed",
    _checks("speed", "ResNet-50 transformer"),
    seconds=1800.0,
    # Ranks that do not train wait in a collective for the others.
    environment={"HOROVOD_STALL_CHECK_DISABLE": "1", "KERAS_DIST_STALL_SECONDS": "0"},
)
STAGES = (ENVIRONMENT, DEVICES, COLLECTIVES, TRUTH, RESUME, SPEED)


def stages(only: str | None, *, has_speed: bool) -> list[Stage]:
    """Choose the stages of `keras-dist check`, in their order.

    Args:
        only: Names of the stages to run, separated by commas; `None` for all.
        has_speed: Whether to measure the speed, if all stages are to run.

    Raises:
        ValueError: If there is no stage of such a name.
    """
    if only is None:
        return [stage for stage in STAGES if has_speed or stage is not SPEED]
    names = only.split(",")
    known = [stage.name for stage in STAGES]
    if not set(names) <= set(known):
        raise ValueError(
            f"Groups of checks are {', '.join(known)}. Received: --only {only}"
        )
    return [stage for stage in STAGES if stage.name in names]


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Args:
        group: Group of the check, such as "collectives".
        name: Name of the check, unique in its group.
        status: `OK`, `FAILED`, `WARNING` (it holds, but deserves a look) or `UNTRIED`;
            or `BEGUN`, in a report from rank to command.
        seen: What was seen, in words.
        cure: What to do; empty if nothing.
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
        """Return the line that a rank prints for the command."""
        return _MARK + json.dumps(dataclasses.asdict(self))


def result_in(line: str) -> Result | None:
    """Parse a line of output; `None` if it reports no result.

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


def holds(results: Sequence[Result]) -> bool:
    """Tell whether no check has failed, and at least one was tried."""
    states = {result.status for result in results}
    return FAILED not in states and bool(states - {UNTRIED})


def ok(seen: str, **data: Any) -> Found:
    """Return the outcome of a check that holds."""
    return OK, seen, "", data


def failed(seen: str, cure: str, **data: Any) -> Found:
    """Return the outcome of a check that does not hold."""
    return FAILED, seen, cure, data


def warning(seen: str, cure: str, **data: Any) -> Found:
    """Return the outcome of a check that holds, but deserves a look."""
    return WARNING, seen, cure, data


def untried(seen: str, cure: str = "", **data: Any) -> Found:
    """Return the outcome of a check that cannot be tried here."""
    return UNTRIED, seen, cure, data


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments with which the command starts the ranks of a stage."""
    parser.add_argument("stage", help=argparse.SUPPRESS)
    parser.add_argument(
        "--checks",
        type=lambda text: text.split(","),
        default=[],
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--script", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--run-name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)


def run_stage(options: argparse.Namespace) -> None:
    """Run one stage on this rank."""
    module = importlib.import_module(f"keras_dist.tools.check.{options.stage}")
    module.run(options)


class Reporting:
    """The checks of a stage on one rank.

    Args:
        group: Group of the checks.
        names: Names of the checks that this launch is to try.
    """

    def __init__(self, group: str, names: Collection[str]) -> None:
        self._group, self._names = group, names

    def check(
        self,
        name: str,
        try_it: Callable[..., Found],
        *arguments: Any,
        group: str = "",
    ) -> None:
        """Try a check, and report its outcome.

        The outcome is the same on all ranks, and all report it: each command shows the
        reports of its own ranks, and each result once.

        Args:
            name: Name of the check.
            try_it: A function that all ranks call.
            *arguments: Its arguments.
            group: Group of the check, if it is another one.
        """
        if name not in self._names:
            return
        self._report(group, name, (BEGUN, "", "", {}))
        self._report(group, name, try_it(*arguments))

    def _report(self, group: str, name: str, found: Found) -> None:
        few = int(os.environ.get("HOROVOD_SIZE", "1")) <= _MOST
        if few or os.environ.get("HOROVOD_LOCAL_RANK") == "0":
            print(Result(group or self._group, name, *found).line(), flush=True)


def own_host() -> str:
    """Return the name of this rank's host, as the launcher calls it."""
    return os.environ.get("HOROVOD_HOSTNAME", "localhost")


def by_value(values: Sequence[Any], hosts: Sequence[str]) -> str:
    """Say which ranks have which value.

    >>> by_value(["2.21.0", "2.21.0", "2.20.0"], ["a", "a", "b"])
    '2.21.0 on ranks 0, 1 (a), 2.20.0 on rank 2 (b)'

    Args:
        values: The value of each rank.
        hosts: The host of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(
        f"{text or 'none'} on {named(own, hosts)}" for text, own in ranks.items()
    )


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks and their hosts.

    >>> named([1, 2], ["a", "b", "b"]), named([0], ["localhost"])
    ('ranks 1, 2 (b)', 'rank 0')
    """
    found = dict.fromkeys(hosts[rank] for rank in ranks)
    where = "" if len(set(hosts)) == 1 else f" ({', '.join(found)})"
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def size_in_words(num_bytes: float) -> str:
    """Write a number of bytes.

    >>> [size_in_words(number) for number in (4, 2048, 3.5 * 2**30)]
    ['4 B', '2.0 KiB', '3.5 GiB']
    """
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"
