"""What one rank passes to Keras instead of the user's data."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_dist.data.arrays_schedule import DataPosition, EpochSchedule
from keras_dist.data.batches_schedule import BatchSchedule

# Keras's default.
KERAS_BATCH_SIZE = 32


@dataclass(frozen=True)
class Feed:
    """The data of one rank, as arguments for Keras, and what is known about it.

    Args:
        arguments: Keyword arguments for `Model.fit` or `Model.evaluate`.
        kind: The type of the data and how it is sharded, in the words of the plan.
        batch_size: Rows in a batch of one rank; `None` if the data decides it.
        num_rows: Rows of all ranks' data, or of this rank's if it is already split.
        rank_rows: Rows that this rank reads in a pass; `None` unless sharded by row.
        left_out: Rows of a pass that no rank reads.
        steps_before: Steps that one process would make; `None` if unknown.
        steps: Steps that this rank makes, perhaps an estimate; `None` if unknown.
        is_exact: Whether `steps` is certain, not an estimate.
        is_scaled: Whether `steps` was computed from a number that the user gave.
        has_rows: `False` if this rank has no rows of its own and evaluates a copy of
            another rank's row, which its metrics must not count.
        is_marked: Whether each element is a pair of a batch and a mark, as `marked`
            makes it.
        leftover: How the batches that are left over at the end of a pass are divided,
            in the words of the plan; "" if there are none.
        epoch: Has a method `assign(epoch)`, to be called before each epoch is read;
            `None` if the data is the same in every epoch.
        schedule: Which rows or batches come in which epoch; `None` if the data cannot
            be read from the middle of an epoch.
        rows_of_all: Function of the number of a step of the fit (a tensor) that returns
            the rows of all ranks at this step; `None` if unknown beforehand.
        rows_at: Function of an epoch, a step in it and the batch that was read there.
            Returns the indices of the batch's rows in the user's arrays, -1 for a row
            that is not found.
        batches_at: Function of an epoch and a step in it that returns the indices of
            the batches in the user's data; `None` if unknown.
        reader: The `UnknownLengthReader` that reads the batches, if one does.
        stream: The `Stream` whose batches are read, to be kept until a pass is read.
        makes_all_batches: Whether each rank makes the batches of all ranks, and leaves
            out those of the others.
        facts: Name and value of everything that has to be equal on all ranks.
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
    is_marked: bool = False
    leftover: str = ""
    epoch: Any = None
    schedule: EpochSchedule | BatchSchedule | None = None
    rows_of_all: Callable[[Any], Any] | None = None
    rows_at: Callable[[int, int, Any], Any] | None = None
    batches_at: Callable[[int, int], Sequence[int]] | None = None
    reader: Any = None
    stream: Any = None
    makes_all_batches: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankBatches:
    """The batches that one rank reads, and what is known about them.

    Args:
        data: The batches, in a type that Keras takes.
        length: Number of batches in a pass, `math.inf`, or `None` if unknown.
        epoch: Has a method `assign(epoch)`, to be called before each epoch is read;
            `None` if the data is the same in every epoch.
        schedule: Which batches come in which epoch; `None` if the data cannot be read
            from the middle of an epoch.
        reader: The reader of `data`, if the length is unknown.
        total: Batches of all ranks in a pass, if the data was divided before its rows
            were decoded and they are known.
        has_rows: `False` if this rank has no rows of its own and evaluates a copy of
            another rank's row, which its metrics must not count.
        is_marked: As of `Feed`.
        leftover: As of `Feed`.
    """

    data: Any
    length: float | None
    epoch: Any = None
    schedule: BatchSchedule | None = None
    reader: Any = None
    total: int | None = None
    has_rows: bool = True
    is_marked: bool = False
    leftover: str = ""


@dataclass(frozen=True)
class Channel:
    """Collectives for data that communicates with the other ranks while it is read.

    Args:
        sum: Sums a whole number over all ranks.
        gather: Returns the values of all ranks, in rank order.
    """

    sum: Callable[[int], int]
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class ShardSpec:
    """How data is divided among the ranks.

    Args:
        rank: This rank.
        size: Number of ranks.
        shard: `"auto"` to shard the data; `"source"` to let TensorFlow divide files;
            `"none"` if the user has already split it.
        seed: Seed of the order of the rows, the same on all ranks.
        channel: Collectives for data that needs them while it is read.
        keeps_position: Whether the order of the rows is ours on a single rank, too. A
            checkpoint needs that: another number of ranks may resume from it.
        position: The position in the data to resume from, if any.
        same: For the "training" and the "validation" data that comes in batches:
            whether batch i is the same on all ranks, or may be taken for it.
        notes: What the plan says of such data, beside how it is sharded.
        unordered: Names of such data that the ranks read in different orders.
        lengths: For data that was divided before its rows were decoded: the batches in
            a pass of each rank, `math.inf`, or `None` if unknown.
        rows: For such data of which this rank has nothing: a row of another rank.
        leftover: What becomes of the last batches, if fewer are left than there are
            ranks: `"cut"`: their rows are divided; `"whole"`: some ranks have one, and
            the others take part in the step without rows; `"drop"`: they are left out;
            `"auto"`: they are cut where that can be.
        can_mark: Whether a step may be told that its batch has no rows.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0
    channel: Channel | None = None
    keeps_position: bool = False
    position: DataPosition | None = None
    same: Mapping[str, bool] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    unordered: Collection[str] = ()
    lengths: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    leftover: str = "auto"
    can_mark: bool = True

    def __post_init__(self) -> None:
        if self.shard not in ("auto", "source", "none"):
            raise ValueError(
                '`shard` must be "auto", "source" or "none" (the data is already '
                f"split). Received: shard={self.shard!r}"
            )
        if self.leftover not in ("auto", "cut", "whole", "drop"):
            raise ValueError(
                "`leftover`, what becomes of the last batches of a pass if they are "
                'fewer than the ranks, must be "auto", "cut", "whole" or "drop". '
                f"Received: leftover={self.leftover!r}"
            )
        if self.leftover == "whole" and not self.can_mark:
            raise ValueError(
                'With leftover="whole" some ranks make a step without rows, which is '
                "not possible with `class_weight` for batches, nor with local SGD "
                '(`sync`). Received: leftover="whole". Pass sample weights with the '
                'batches instead of `class_weight`, or leftover="drop".'
            )
