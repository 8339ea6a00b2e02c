"""Divide the steps of a training over the ranks: which items each rank reads, and when.

An *item* is a row of arrays, or a batch of data that comes in batches. One process
reads the items in order, the next global batch in each step. N ranks read the same
global batches, of which each has a part. All ranks make the same steps: a rank that has
no item of a small last global batch takes part without rows.

With `batch="global"` the global batch is the batch that the user asked for. A batch of
data that comes in batches is then one global batch, of which each rank has rows.

Arithmetic only: rank and size are arguments, and nothing is read here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import keras

from keras_dist.errors import check_count

StepsRule = Literal["auto", "divide", "none"]


@dataclass(frozen=True)
class DataPosition:
    """Position of a training in its data, for any number of ranks.

    Args:
        epoch: Number of the current epoch.
        step: Steps of this epoch that are done.
        items: Rows, or batches of data that comes in batches, that were read before, in
            all passes together.
    """

    epoch: int
    step: int
    items: int


@dataclass(frozen=True)
class ReadContext:
    """What a call has to know to read its data.

    Args:
        rank: This rank.
        size: Number of ranks.
        shard: `"auto"` to shard the data, `"none"` if the user has already split it,
            `"first"` if the first rank reads and sends it.
        seed: Seed of the order of the rows, the same on all ranks.
        keras_seed: The seed with which Keras shuffles arrays, the same on all ranks;
            `None` if it draws one.
        gather: Returns the values of all ranks, in rank order, for data that
            communicates while it is read.
        keeps_position: Whether the order of the rows is ours on a single rank, too. A
            checkpoint needs that: another number of ranks may resume from it.
        first_epoch: Number of the epoch that begins with the first row, if no position
            is given.
        position: The position in the data to resume from, if any.
        facts_before: With `position`, what `Division.facts` were then; `None` for what
            they are now.
        batch: Whose batch the user's batch is: `"rank"`, or `"global"` for the batch of
            all ranks together.
        steps_per_execution: Of the model: Keras makes a multiple of them if it is given
            a number of steps.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0
    gather: Callable[[Any], list[Any]] | None = None
    keeps_position: bool = False
    first_epoch: int = 0
    position: DataPosition | None = None
    batch: str = "rank"
    keras_seed: int | None = None
    facts_before: Mapping[str, Any] | None = None
    steps_per_execution: int = 1

    def scale_steps(self, rule: str, steps: int | None, *, name: str) -> int | None:
        """Scale the steps of a script for one process to steps of each rank.

        One process makes whole executions.

        Args:
            rule: `"divide"` by the number of ranks and round up, or `"none"`.
            steps: Steps that the script asks for, or `None` for all of the data.
            name: The name of the argument, for the error.

        Raises:
            ValueError: If `steps` is not a positive whole number.

        >>> ReadContext(0, 3).scale_steps("divide", 100, name="steps")
        34
        """
        if steps is None:
            return None
        steps = check_count(name, steps)
        if self.size > 1:
            steps += -steps % self.steps_per_execution
        return -(-steps // self.size) if rule == "divide" else steps

    @property
    def is_global(self) -> bool:
        """Return True if ranks share the batches that the user asked for."""
        return self.batch == "global" and self.size > 1

    @property
    def batches_per_step(self) -> int:
        """The user's batches that all ranks together read in a step of a training."""
        return 1 if self.is_global else self.size


def limit_steps(steps: int | None) -> int | None:
    """Return the steps of an epoch, up to `keras.config.set_max_steps_per_epoch`."""
    limit = getattr(keras.config, "max_steps_per_epoch", lambda: None)()
    return limit if limit and (steps is None or limit < steps) else steps


def no_data(received: str, *, is_training: bool = False) -> ValueError:
    """Return the error of a call whose data has no row."""
    text = "There is nothing to validate on, or to predict"
    text = "There is no data to train on" if is_training else text
    return ValueError(f"{text}. Received: {received}. Pass at least one row.")


def divide_batch(batch_size: int, size: int, option: str) -> int:
    """Return each rank's rows of a shared batch, which `option` divides evenly.

    Raises:
        ValueError: If `batch_size` is not a multiple of the number of ranks.
    """
    if batch_size % size or batch_size < 1:
        raise ValueError(
            f"With {option}, each rank has the same number of rows of a batch that all "
            f"ranks share. Received: batch_size={batch_size} for {size} ranks. Choose "
            f"a multiple of the number of ranks, or leave out {option}."
        )
    return batch_size // size


@dataclass(frozen=True)
class Division:
    """The items that all ranks read at each step of a training, new or resumed.

    A pass reads every item once. An epoch may be shorter or longer than a pass, and
    then begins where the epoch before it ended. A resumed training begins with the rest
    of an epoch, in the middle of a pass: the first epoch and the first pass may be
    shorter than the later ones.

    Steps are counted from 0 where this training begins. `span` takes integers or arrays
    of them.

    Args:
        total: Items in a pass.
        size: Number of ranks.
        global_batch: Items of all ranks in a step.
        steps: Steps of a whole epoch.
        steps_per_pass: Steps of a whole pass.
        steps_in_first_pass: Steps of what is left of the first pass.
        first_steps: Steps of the first epoch that are left.
        unit: What an item is: `"rows"` or `"batches"`.
        seeds: Of shuffles that decide the order of the items; `None` for none.
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
    seeds: list[tuple[int, int]] | None = None
    epoch: int = 0
    first_pass: int = 0
    begin: int = 0

    @classmethod
    def of(
        cls,
        context: ReadContext,
        total: int,
        *,
        per_step: int,
        unit: str,
        steps: int | None = None,
        seeds: list[tuple[int, int]] | None = None,
    ) -> "Division":
        """Divide a training, from its beginning or from a position.

        Args:
            context: The ranks, and where to resume; perhaps another number of ranks
                saved that.
            total: Items of the data.
            per_step: Items that all ranks read in a step.
            unit: What an item is: `"rows"` or `"batches"`.
            steps: Steps of an epoch; `None` for the steps of a pass.
            seeds: Of shuffles that decide the order of the items.

        Raises:
            ValueError: If the position is in the middle of an epoch of other data.
        """
        position = context.position
        in_pass = -(-total // per_step)
        per_epoch = steps or in_pass
        sizes = (total, context.size, per_step, per_epoch, in_pass, in_pass, per_epoch)
        new = cls(*sizes, unit, seeds)
        if position is None:
            return replace(
                new, epoch=context.first_epoch, first_pass=context.first_epoch
            )
        before = context.facts_before or new.facts()
        first_pass, begin = divmod(position.items, before["items"])
        new = replace(new, epoch=position.epoch, first_pass=first_pass)
        if not (position.step or begin):
            return new
        new._check_same(before)
        in_pass = left = -(-(total - begin) // per_step)
        if per_epoch != new.steps_per_pass or not position.step:
            left = -(-(before["steps"] - position.step) * per_epoch // before["steps"])
        return replace(new, first_steps=left, begin=begin, steps_in_first_pass=in_pass)

    def facts(self) -> dict[str, Any]:
        """Return what a position in the middle of an epoch depends on."""
        return {"items": self.total, "steps": self.steps, "seeds": self.seeds}

    @property
    def is_within_epoch(self) -> bool:
        """Return True if the first epoch is shorter, being the rest of one."""
        return self.first_steps < self.steps

    @property
    def known_items(self) -> int | None:
        """The items of each rank in each step; `None` if they differ.

        As in Keras, the shape of a batch then has them, and layers may ask for it.
        """
        each, rest = divmod(self.global_batch, self.size)
        lengths = self.total, self.total - self.begin  # of a whole pass, and the first
        is_even = not any(length % self.global_batch for length in lengths)
        return each if is_even and not rest else None

    def find_first_step(self, epoch: int) -> int:
        """Return the first step of an epoch, which must not be before the first one."""
        later = epoch - self.epoch
        return later * self.steps - (later > 0) * (self.steps - self.first_steps)

    def count_steps(self, epoch: int) -> int:
        """Return the steps of an epoch."""
        return self.first_steps if epoch <= self.epoch else self.steps

    def span(self, step: Any) -> tuple[Any, Any, Any]:
        """Find the items that all ranks read at a step.

        Returns:
            The pass, counted from 0 where this training begins; the index in it of the
            first item; and the index after the last item.

        >>> rows = Division.of(ReadContext(0, 2), 105, per_step=20, unit="rows")
        >>> [rows.span(step) for step in (0, 5, 6)]
        [(0, 0, 20), (0, 100, 105), (1, 0, 20)]
        """
        global_size, per_pass = self.global_batch, self.steps_per_pass
        # The first pass ends as a whole one does: what is missing is its beginning.
        missing = per_pass - self.steps_in_first_pass
        number, step = (step + missing) // per_pass, (step + missing) % per_pass
        is_first, is_last = number == 0, step + 1 == per_pass
        begin = step * global_size + is_first * (self.begin - missing * global_size)
        end = begin + global_size
        return number, begin, end + is_last * (self.total - end)

    def position(self, epoch: int, done: int) -> DataPosition:
        """Return the position after `done` steps of an epoch.

        After its last step, that is the beginning of the next epoch.
        """
        number, begin, _ = self.span(self.find_first_step(epoch) + done)
        done += self.steps - self.count_steps(epoch)
        if done == self.steps:
            epoch, done = epoch + 1, 0
        items = (self.first_pass + number) * self.total + begin
        return DataPosition(epoch, done, items)

    def _check_same(self, before: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if a training had other data before."""
        if before["items"] != self.total:
            raise ValueError(
                "The training cannot continue in the middle of an epoch with other "
                f"data. Received: {self.total} {self.unit}, and a checkpoint of a "
                f"training with {before['items']} rows or batches. Pass the same data, "
                "or an empty folder."
            )
        seeds = before["seeds"]
        seeds = seeds and [tuple(pair) for pair in seeds]  # lists, in a checkpoint
        if seeds != self.seeds:
            raise ValueError(
                "The training cannot continue in the middle of an epoch if the data "
                "comes in another order: rows would come twice. Received: shuffles "
                f"with the seeds {self.seeds or 'none'}, and {seeds or 'none'} in the "
                "checkpoint. Set the same seeds as before (`shuffle(seed=…)`, "
                "keras.utils.set_random_seed), or pass an empty folder."
            )
