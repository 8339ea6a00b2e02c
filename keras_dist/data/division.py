"""Divide the steps of a training over the ranks: which items each rank reads, and when.

An *item* is a row of arrays, or a batch of data that comes in batches. One process
reads the items in order, the next global batch in each step. N ranks read the same
global batches: rank r has the items r, r + N, … of each. All ranks make the same
steps, so a last global batch with fewer items than ranks needs a rule of its own:
rows are left out, and for batches `round_robin.Tail` decides.

With `batch="global"` the global batch is the batch that the user asked for. A batch of
data that comes in batches is then one global batch, of which each rank has rows; and a
rank that has no row of a small last batch takes part in the step without rows.

Arithmetic only: rank and size are arguments, and nothing is read here.
"""

from collections.abc import Callable, Sequence
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
        leftover: What happens to the last batches, if fewer are left than there are
            ranks: `"cut"`: their rows are divided; `"whole"`: some ranks have one, and
            the others take part in the step without rows; `"drop"`: they are left out;
            `"auto"`: they are cut where possible.
        can_mark: Whether a step can be told that its batch has no rows.
        batch: Whose batch the user's batch is: `"rank"`, or `"global"` for the batch of
            all ranks together.

    Raises:
        ValueError: If `shard` or `leftover` is unknown, `leftover` is `"whole"` and
            steps cannot be marked, or `leftover` has no meaning.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0
    channel: Channel | None = None
    keeps_position: bool = False
    position: DataPosition | None = None
    leftover: str = "auto"
    can_mark: bool = True
    batch: str = "rank"
    keras_seed: int | None = None
    seeds_before: list[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.batch == "global" and self.leftover != "auto":
            raise ValueError(
                '`leftover` has no meaning with batch="global": no batches are left '
                "over, since all ranks have rows of each batch. Received: "
                f"leftover={self.leftover!r}. Leave it out."
            )
        if self.shard not in ("auto", "none"):
            raise ValueError(
                '`shard` must be "auto" or "none" (the data is already split). '
                f"Received: shard={self.shard!r}"
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
                "not possible with `class_weight` for batches. Received: "
                'leftover="whole". Pass sample weights with the batches instead of '
                '`class_weight`, or leftover="drop".'
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


def steps_of_rows(num_rows: int, *, global_batch: int, least: int) -> int:
    """Count the steps of a pass over `num_rows` rows, the same on every rank.

    A last global batch with fewer than `least` rows is left out.

    >>> [steps_of_rows(n, global_batch=20, least=2) for n in (100, 101, 102)]
    [5, 5, 6]
    """
    full, tail = divmod(num_rows, global_batch)
    return full + (tail >= least)


def batches_of_step(
    begin: int, *, total: int | None, rank: int, size: int, is_mixed: bool = False
) -> Sequence[int]:
    """Name the batches of which one rank has rows in a step.

    They are several where fewer batches are left than there are ranks, or where each
    rank has rows of every batch of the step: `is_mixed`.

    Args:
        begin: Index of the first batch of the step, of all ranks.
        total: Batches of a pass; `None` if unknown.

    >>> [batches_of_step(n, total=5, rank=1, size=2) for n in (0, 2, 4)]
    [[1], [3], [4]]
    """
    end = begin + size if total is None else min(begin + size, total)
    whole = list(range(begin, end))
    return whole[rank : rank + 1] if len(whole) == size and not is_mixed else whole


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
    def of_rows(
        cls,
        position: DataPosition | None,
        num_rows: int,
        *,
        batch_size: int,
        size: int,
        steps: int | None = None,
        is_global: bool = False,
    ) -> "Division":
        """Divide the rows of arrays.

        Args:
            position: Where to resume, perhaps saved by another number of ranks; `None`
                for a new training.
            num_rows: Rows of the data.
            batch_size: Rows of one rank's batch.
            size: Number of ranks.
            steps: Steps of an epoch; `None` for the steps of a pass.
            is_global: Whether `batch_size` is that of all ranks together. Then a rank
                may have no row of the last batch of a pass.

        Raises:
            ValueError: If `position` is in the middle of an epoch of other data.
        """

        global_batch = batch_size if is_global else batch_size * size
        least = 1 if is_global else size

        def steps_after(read: int) -> int:
            left = num_rows - read
            return steps_of_rows(left, global_batch=global_batch, least=least)

        in_pass = steps_after(0)
        of_epoch = steps or in_pass
        whole = cls(
            num_rows, size, global_batch, of_epoch, in_pass, in_pass, of_epoch, "rows"
        )
        is_within = position is not None and bool(position.done or position.row)
        return whole._from(position, steps_after if is_within else None)

    @classmethod
    def of_batches(
        cls,
        position: DataPosition | None,
        length: int,
        *,
        size: int,
        steps_after: Callable[[int], int],
        per_step: int | None = None,
    ) -> "Division":
        """Divide batches; each epoch is one pass.

        `length` is the number of batches in a pass, `steps_after` counts the steps of
        the rest of a pass of which some batches were read, and all ranks together read
        `per_step` batches in a step, by default one each. See `of_rows`.
        """
        steps = steps_after(0)
        in_step = per_step or size
        whole = cls(length, size, in_step, steps, steps, steps, steps, "batches")
        is_within = position is not None and position.done > 0
        return whole._from(position, steps_after if is_within else None)

    @property
    def is_within_epoch(self) -> bool:
        """Tell whether the first epoch is shorter, being the rest of one."""
        return self.first_steps < self.steps

    @property
    def left_out(self) -> int:
        """Items of a whole pass that no rank reads."""
        return self.total - self._end_of_pass(0, self.steps_per_pass)

    def items_of_rank(self, rank: int) -> int:
        """Count the items that a rank reads in a whole pass.

        >>> rows = Division.of_rows(None, 101, batch_size=10, size=3)
        >>> [rows.items_of_rank(rank) for rank in range(3)]
        [34, 34, 33]
        """
        full, tail = divmod(self.total - self.left_out, self.global_batch)
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

        >>> rows = Division.of_rows(None, 105, batch_size=10, size=2)
        >>> [rows.span(step) for step in (0, 5, 6)]
        [(0, 0, 20), (0, 100, 105), (1, 0, 20)]
        """
        global_size, per_pass = self.global_batch, self.steps_per_pass
        # The first pass ends as a whole one does: what is missing is its beginning.
        missing = per_pass - self.steps_in_first_pass
        number, step = (step + missing) // per_pass, (step + missing) % per_pass
        is_first = 1 // (1 + number)
        begin = step * global_size + is_first * (self.begin - missing * global_size)
        end = self._end_of_pass(0, per_pass)
        end_of_first = self._end_of_pass(self.begin, self.steps_in_first_pass)
        end += is_first * (end_of_first - end)
        is_last = (step + 1) // per_pass
        return (
            number,
            begin,
            begin + global_size + is_last * (end - begin - global_size),
        )

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

    def _end_of_pass(self, begin: int, steps: int) -> int:
        return min(self.total, begin + steps * self.global_batch)

    def _from(
        self, position: DataPosition | None, steps_after: Callable[[int], int] | None
    ) -> "Division":
        """Begin at a position; without `steps_after`, with a whole epoch and pass."""
        if position is None:
            return self
        if steps_after is None:
            return replace(self, epoch=position.epoch, first_pass=position.number)
        if position.num_rows != self.total:
            raise ValueError(
                "The training cannot go on in the middle of an epoch with other data. "
                f"Received: {self.total} {self.unit}, and a checkpoint of a training "
                f"with {position.num_rows} rows or batches. Pass the same data, or an "
                "empty folder."
            )
        in_pass = left = steps_after(position.row)
        is_pass = self.steps == self.steps_per_pass
        ends_with_pass = is_pass and position.done > 0
        if not ends_with_pass:
            left = -(-(position.steps - position.done) * self.steps // position.steps)
        if in_pass and left:
            return replace(
                self,
                epoch=position.epoch,
                first_steps=left,
                first_pass=position.number,
                begin=position.row,
                steps_in_first_pass=in_pass,
            )
        # Fewer items of the pass are left than there are ranks now: they are left out.
        return replace(
            self,
            epoch=position.epoch + ends_with_pass,
            first_steps=self.steps if is_pass else left,
            first_pass=position.number + 1,
        )
