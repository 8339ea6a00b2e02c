"""Divide the steps of a training over the ranks: which items each rank reads, and when.

An *item* is a row of arrays, or a batch of data that comes in batches. One process
reads the items in order, the next global batch in each step. N ranks read the same
global batches: rank r has the items r, r + N, … of each. All ranks make the same
steps: a rank that has no item of a small last global batch takes part without rows.

With `batch="global"` the global batch is the batch that the user asked for. A batch of
data that comes in batches is then one global batch, of which each rank has rows.

Arithmetic only: rank and size are arguments, and nothing is read here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Channel:
    """Collectives for data that communicates with the other ranks while it is read.

    Args:
        sum: Sums a whole number over all ranks.
        gather: Returns the values of all ranks, in rank order: numbers, texts or
            `None`.
    """

    sum: Callable[[int], int]
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class DataPosition:
    """Position of a training in its data, for any number of ranks.

    Saved in checkpoints. For data that comes in batches, `row` and `num_rows` count
    batches.

    Args:
        epoch: Number of the current epoch.
        done: Steps of this epoch that are done.
        steps: Steps of the whole epoch.
        number: Number of the current pass over the rows.
        row: Rows of this pass that have been read.
        num_rows: Rows of the data.
    """

    epoch: int
    done: int
    steps: int
    number: int
    row: int
    num_rows: int


@dataclass(frozen=True)
class ShardSpec:
    """The ranks, and what the call says about how to divide data among them.

    Args:
        rank: This rank.
        size: Number of ranks.
        shard: `"auto"` to shard the data, `"none"` if the user has already split it.
        seed: Seed of the order of the rows, the same on all ranks.
        keras_seed: The seed with which Keras shuffles arrays, the same on all ranks;
            `None` if it draws one.
        seeds_before: The seeds of the data's shuffles in the checkpoint to resume from;
            `None` if the position does not depend on them.
        channel: Collectives for data that needs them while it is read.
        keeps_position: Whether the order of the rows is ours on a single rank, too. A
            checkpoint needs that: another number of ranks may resume from it.
        position: The position in the data to resume from, if any.
        batch: Whose batch the user's batch is: `"rank"`, or `"global"` for the batch of
            all ranks together.

    Raises:
        ValueError: If `shard` is unknown.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0
    channel: Channel | None = None
    keeps_position: bool = False
    position: DataPosition | None = None
    batch: str = "rank"
    keras_seed: int | None = None
    seeds_before: list[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.shard not in ("auto", "none"):
            raise ValueError(
                '`shard` must be "auto" or "none" (the data is already split). '
                f"Received: shard={self.shard!r}"
            )

    @property
    def is_global(self) -> bool:
        """Tell whether ranks share the batches that the user asked for."""
        return self.batch == "global" and self.size > 1

    def local_batch(self, batch_size: int) -> int:
        """Return this rank's rows of a full batch of the user's `batch_size`."""
        if not self.is_global:
            return batch_size
        return len(range(batch_size)[own_items(self.rank, self.size)])


def own_items(rank: int, size: int) -> slice:
    """Select the items of one rank: every `size`-th, starting at `rank`.

    >>> [list(range(7))[own_items(r, 3)] for r in range(3)]
    [[0, 3, 6], [1, 4], [2, 5]]
    """
    return slice(rank, None, size)


@dataclass(frozen=True)
class Division:
    """The items that all ranks read at each step of a training, new or resumed.

    A pass reads every item once. An epoch may be shorter or longer than a pass, and
    then begins where the epoch before it ended. A resumed training begins with the rest
    of an epoch, in the middle of a pass: the first epoch and the first pass may be
    shorter than the later ones.

    Steps are counted from 0 where this training begins. `span` and `first_step_of`
    take Python integers or integer tensors.

    Args:
        total: Items in a pass.
        size: Number of ranks.
        global_batch: Items of all ranks in a step.
        steps: Steps of a whole epoch.
        steps_per_pass: Steps of a whole pass.
        steps_in_first_pass: Steps of what is left of the first pass.
        first_steps: Steps of the first epoch that are left.
        unit: What an item is: `"rows"` or `"batches"`.
        epoch: Number of the first epoch.
        first_pass: Number of the first pass.
        begin: Index in the first pass of the first item to read.
    """

    total: int
    size: int
    global_batch: int
    steps: int
    steps_per_pass: int
    steps_in_first_pass: int
    first_steps: int
    unit: str
    epoch: int = 0
    first_pass: int = 0
    begin: int = 0

    @classmethod
    def of(
        cls,
        position: DataPosition | None,
        total: int,
        *,
        per_step: int,
        size: int,
        unit: str,
        steps: int | None = None,
    ) -> "Division":
        """Divide a training, from its beginning or from a position.

        Args:
            position: Where to resume, perhaps saved by another number of ranks; `None`
                for a new training.
            total: Items of the data.
            per_step: Items that all ranks read in a step.
            size: Number of ranks.
            unit: What an item is: `"rows"` or `"batches"`.
            steps: Steps of an epoch; `None` for the steps of a pass.

        Raises:
            ValueError: If `position` is in the middle of an epoch of other data.
        """
        in_pass = -(-total // per_step)
        of_epoch = steps or in_pass
        whole = cls(total, size, per_step, of_epoch, in_pass, in_pass, of_epoch, unit)
        if position is None:
            return whole
        if not (position.done or position.row):
            return replace(whole, epoch=position.epoch, first_pass=position.number)
        return whole._resumed(position)

    @property
    def is_within_epoch(self) -> bool:
        """Tell whether the first epoch is shorter, being the rest of one."""
        return self.first_steps < self.steps

    def items_of_rank(self, rank: int) -> int:
        """Count the items that a rank reads in a whole pass.

        >>> rows = Division.of(None, 101, per_step=30, size=3, unit="rows")
        >>> [rows.items_of_rank(rank) for rank in range(3)]
        [34, 34, 33]
        """
        full, tail = divmod(self.total, self.global_batch)
        own = own_items(rank, self.size)
        return full * len(range(self.global_batch)[own]) + len(range(tail)[own])

    @property
    def has_empty_parts(self) -> bool:
        """Tell whether the last step of a pass may have fewer items than ranks."""
        lengths = self.total, self.total - self.begin
        return any(0 < length % self.global_batch < self.size for length in lengths)

    def first_step_of(self, epoch: Any) -> Any:
        """Return the first step of an epoch, which must not be before the first one."""
        later = epoch - self.epoch
        is_first = 1 // (1 + later)
        return later * self.steps - (1 - is_first) * (self.steps - self.first_steps)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return the steps of an epoch."""
        return self.first_steps if epoch <= self.epoch else self.steps

    def skipped_in(self, epoch: int) -> int:
        """Return the items of an epoch that were read before the training resumed."""
        return self.begin if epoch == self.epoch else 0

    def span(self, step: Any) -> tuple[Any, Any, Any]:
        """Find the items that all ranks read at a step.

        Returns:
            The pass, counted from 0 where this training begins; the index in it of the
            first item; and the index after the last item.

        >>> rows = Division.of(None, 105, per_step=20, size=2, unit="rows")
        >>> [rows.span(step) for step in (0, 5, 6)]
        [(0, 0, 20), (0, 100, 105), (1, 0, 20)]
        """
        global_size, per_pass = self.global_batch, self.steps_per_pass
        # The first pass ends as a whole one does: what is missing is its beginning.
        missing = per_pass - self.steps_in_first_pass
        number, step = (step + missing) // per_pass, (step + missing) % per_pass
        is_first = 1 // (1 + number)
        begin = step * global_size + is_first * (self.begin - missing * global_size)
        is_last = (step + 1) // per_pass
        end = begin + global_size
        return number, begin, end + is_last * (self.total - end)

    def position(self, epoch: int, done: int) -> DataPosition:
        """Return the position after `done` steps of an epoch.

        After its last step, that is the beginning of the next epoch.
        """
        number, begin, _ = self.span(self.first_step_of(epoch) + done)
        number += self.first_pass
        done += self.steps - self.steps_of_epoch(epoch)
        if done == self.steps:
            epoch, done = epoch + 1, 0
        return DataPosition(epoch, done, self.steps, number, begin, self.total)

    def _resumed(self, position: DataPosition) -> "Division":
        """Begin at a position in the middle of an epoch."""
        if position.num_rows != self.total:
            raise ValueError(
                "The training cannot go on in the middle of an epoch with other data. "
                f"Received: {self.total} {self.unit}, and a checkpoint of a training "
                f"with {position.num_rows} rows or batches. Pass the same data, or an "
                "empty folder."
            )
        in_pass = left = -(-(self.total - position.row) // self.global_batch)
        if self.steps != self.steps_per_pass or not position.done:
            left = -(-(position.steps - position.done) * self.steps // position.steps)
        return replace(
            self,
            epoch=position.epoch,
            first_steps=left,
            first_pass=position.number,
            begin=position.row,
            steps_in_first_pass=in_pass,
        )
