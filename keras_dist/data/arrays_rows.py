"""Which rows belong to which rank: arithmetic only.

One process with the global batch size G reads rows 0 … G − 1, then G … 2G − 1, and so
on. N ranks read the same global batches: rank r reads the rows r, r + N, … of each.
"""

from typing import Any


def shard_rows(num_rows: int, *, rank: int, size: int) -> slice:
    """Rows that belong to one rank: every `size`-th row, starting at `rank`.

    >>> [list(range(7))[shard_rows(7, rank=r, size=3)] for r in range(3)]
    [[0, 3, 6], [1, 4], [2, 5]]
    """
    return slice(rank, num_rows, size)


def left_out_rows(num_rows: int, *, batch_size: int, size: int) -> int:
    """Rows of a pass that no rank reads: a last global batch smaller than `size`.

    All ranks make the same number of steps, and a rank needs a row for each step.

    >>> left_out_rows(101, batch_size=10, size=2)
    1
    """
    tail = num_rows % (batch_size * size)
    return tail if tail < size else 0


def steps_of_rows(num_rows: int, *, batch_size: int, size: int) -> int:
    """Steps of a pass over `num_rows` rows, the same on every rank.

    >>> steps_of_rows(101, batch_size=10, size=2)
    5
    """
    used = num_rows - left_out_rows(num_rows, batch_size=batch_size, size=size)
    return -(-used // (batch_size * size))


def rows_of_rank(num_rows: int, *, batch_size: int, rank: int, size: int) -> int:
    """How many rows `rank` reads in a pass over `num_rows` rows.

    >>> [rows_of_rank(101, batch_size=10, rank=r, size=3) for r in range(3)]
    [34, 34, 33]
    """
    used = num_rows - left_out_rows(num_rows, batch_size=batch_size, size=size)
    return len(range(rank, used, size))


def rows_of_step(step: Any, num_rows: int, *, batch_size: int, size: int) -> Any:
    """Rows in the global batch at `step`, counted from the first step of the fit.

    Only the last step of each pass may have fewer than `batch_size` × `size` rows.

    Args:
        step: An integer or a scalar tensor.
        num_rows: Rows of the data.
        batch_size: Rows of one rank's batch.
        size: Number of ranks.

    Returns:
        The number of rows, a tensor if `step` is one.

    >>> [rows_of_step(n, 101, batch_size=10, size=2) for n in (0, 4, 5, 9)]
    [20, 20, 20, 20]
    >>> [rows_of_step(n, 105, batch_size=10, size=2) for n in (0, 4, 5, 6, 11)]
    [20, 20, 5, 20, 5]
    """
    used = num_rows - left_out_rows(num_rows, batch_size=batch_size, size=size)
    steps = steps_of_rows(num_rows, batch_size=batch_size, size=size)
    global_batch_size = batch_size * size
    is_last = (step % steps) // (steps - 1) if steps > 1 else 1
    return global_batch_size - is_last * (steps * global_batch_size - used)
