"""What the ranks of a stage have: report a result, and go on after an error."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_dist.launch.monitor.rank_ranges import ranges
from keras_dist.tools.check.result import BEGUN, FAILED, OK, UNTRIED, WARNING, Result

# Of more ranks than these, the first of each host reports.
_MOST = 256

# What a check has found: status, what was seen, what to do, and data.
Found = tuple[str, str, str, Mapping[str, Any]]


def ok(seen: str, **data: Any) -> Found:
    """It holds."""
    return OK, seen, "", data


def failed(seen: str, cure: str, **data: Any) -> Found:
    """It does not."""
    return FAILED, seen, cure, data


def warning(seen: str, cure: str, **data: Any) -> Found:
    """It holds, and is to be looked at."""
    return WARNING, seen, cure, data


def untried(seen: str, cure: str = "", **data: Any) -> Found:
    """It cannot be tried here."""
    return UNTRIED, seen, cure, data


class Reporting:
    """The checks of a stage, on one rank.

    Args:
        group: Their group.
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
        """Try a check, and report what it has found.

        All ranks find the same, and all report it, since each command shows what its
        own ranks report, and shows it once; of many ranks, the first of each host.

        Args:
            name: Name of the check.
            try_it: What all ranks call.
            *arguments: Its arguments.
            group: Its group, if it is another one.
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
    """Name of this rank's host, as the launcher calls it."""
    return os.environ.get("HOROVOD_HOSTNAME", "localhost")


def by_value(values: Sequence[Any], hosts: Sequence[str]) -> str:
    """Which ranks have which value, in words.

    >>> by_value(["2.21.0", "2.21.0", "2.20.0"], ["a", "a", "b"])
    '2.21.0 on ranks 0, 1 (a), 2.20.0 on rank 2 (b)'

    Args:
        values: The value of each rank.
        hosts: The host of each rank.
    """
    texts = [str(value) for value in values]
    return ", ".join(
        f"{text or 'none'} on {named(_ranks_with(text, texts), hosts)}"
        for text in dict.fromkeys(texts)
    )


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks and their hosts in words.

    >>> named([1, 2], ["a", "b", "b"]), named([0], ["localhost"])
    ('ranks 1, 2 (b)', 'rank 0')
    """
    found = dict.fromkeys(hosts[rank] for rank in ranks)
    where = "" if len(set(hosts)) == 1 else f" ({', '.join(found)})"
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def _ranks_with(text: str, texts: Sequence[str]) -> list[int]:
    return [rank for rank, own in enumerate(texts) if own == text]


def size_in_words(num_bytes: float) -> str:
    """Bytes in words.

    >>> [size_in_words(number) for number in (4, 2048, 3.5 * 2**30)]
    ['4 B', '2.0 KiB', '3.5 GiB']
    """
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"
