"""What one rank gives to Keras in place of the user's data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_dist.sharding.arrays_schedule import EpochSchedule, Position
from keras_dist.sharding.batches_schedule import BatchSchedule

# What Keras takes where nobody says otherwise.
KERAS_BATCH_SIZE = 32


@dataclass(frozen=True)
class Feed:
    """Data of one rank, as arguments for Keras, and what is known of it.

    Args:
        arguments: Keyword arguments for `Model.fit` or `Model.evaluate`.
        kind: What became of the data, in words.
        batch_size: Rows of a batch of one rank, `None` where the data decides it.
        num_rows: Rows of all ranks' data, or of this rank's if it is already split.
        rank_rows: Rows that this rank reads in a pass, where they are dealt.
        left_out: Rows of a pass that no rank reads.
        steps_before: Steps that one process would make, where that is known.
        steps: Steps that this rank makes, or about so many.
        is_exact: Whether `steps` cannot turn out otherwise.
        is_scaled: Whether they come from a number that the user gave.
        has_rows: `False` if another rank's row stands in, which must not count.
        epoch: What is told the number of the epoch by `assign`, if anything is.
        schedule: Which rows come when, where rows are dealt.
        rows_of_all: Rows that all ranks together read at a step of the fit, as a
            function of its number (a tensor), where that is known beforehand.
        rows_at: Numbers of this rank's rows in the user's arrays, of an epoch, a step
            of it, and the batch that was read; -1 where nobody knows.
        batches_at: Numbers of this rank's batches in the user's data, of an epoch and a
            step of it, where anybody knows.
        reader: Where batches are read in Python, what reads them.
        facts: What has to be equal on all ranks.
    """

    arguments: dict[str, Any]
    kind: str
    batch_size: int | None = None
    num_rows: int | None = None
    rank_rows: int | None = None
    left_out: int = 0
    steps_before: int | None = None
    steps: int | None = None
    is_exact: bool = True
    is_scaled: bool = False
    has_rows: bool = True
    epoch: Any = None
    schedule: EpochSchedule | BatchSchedule | None = None
    rows_of_all: Callable[[Any], Any] | None = None
    rows_at: Callable[[int, int, Any], Any] | None = None
    batches_at: Callable[[int, int], Sequence[int]] | None = None
    reader: Any = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Channel:
    """How data that is being read talks to the other ranks.

    Args:
        sum: Sum of a number over all ranks.
        gather: What all ranks say, in rank order.
    """

    sum: Callable[[int], int]
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Split:
    """How data is divided among the ranks.

    Args:
        rank: This rank.
        size: Number of ranks.
        shard: `"auto"` to deal arrays row by row, `"none"` if the user has split.
        seed: Of the order of the rows, the same on all ranks.
        channel: To the other ranks, from within the data.
        keeps_position: Whether the order of the rows must be known on one rank too,
            for a training that another number of ranks may go on with.
        position: Where the training has come to, if it goes on.
        same: For each kind of data ("training", "validation") that comes in batches,
            whether all ranks were given the same batches.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0
    channel: Channel | None = None
    keeps_position: bool = False
    position: Position | None = None
    same: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shard not in ("auto", "none"):
            raise ValueError(
                '`shard` must be "auto" or "none" (the data is already split). '
                f"Received: shard={self.shard!r}"
            )
