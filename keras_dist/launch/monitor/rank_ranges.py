"""Many ranks in few words."""

from collections.abc import Iterable


def ranges(ranks: Iterable[int]) -> str:
    """Numbers of ranks in words, three and more in a row by their first and last.

    >>> ranges([4]), ranges([1, 0]), ranges([0, 1, 2, 3, 5, 7, 8])
    ('4', '0, 1', '0 to 3, 5, 7, 8')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
