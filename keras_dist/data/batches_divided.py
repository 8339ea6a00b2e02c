"""One rank's batches of a data set that was divided before its rows were decoded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from keras_dist.data.batches_known_length import (
    checked_length,
    without_auto_shard,
)
from keras_dist.data.batches_schedule import batch_schedule_of, rest_and_whole
from keras_dist.data.batches_stream import Stream, finite_or_none
from keras_dist.data.batches_unknown_length import UnknownLengthReader
from keras_dist.data.division import (
    Division,
    first_steps,
    sources_of,
)
from keras_dist.data.feed import RankBatches, ShardSpec
from keras_dist.data.pipeline import is_reshuffled


def divided_batches(
    stream: Stream, spec: ShardSpec, *, is_training: bool
) -> RankBatches:
    """This rank's batches, which are all that there are in its data set.

    Where fewer rows than ranks are left at the end of a pass, some ranks have a batch
    more. In training they leave it out, as every rank does that is sharded later.

    Args:
        stream: This rank's data.
        spec: How data is divided among the ranks; `spec.lengths` are those of all.
        is_training: Whether all ranks have to make the same number of steps.

    Raises:
        ValueError: If the numbers of batches do not fit together.
    """
    name = "training" if is_training else "validation"
    lengths, data = spec.lengths[name], stream.data
    if is_training and 0 in lengths:
        raise ValueError(
            "Each rank needs at least one row. Received: "
            f"{_shown(lengths)} batches of ranks 0 to {spec.size - 1} in a "
            f"{stream.kind}, divided by `shard`. Pass more data, or start fewer "
            "processes."
        )
    if name in spec.rows:
        row = tf.data.Dataset.from_tensors(spec.rows[name])
        return RankBatches(row, 1, has_rows=False)
    if None in lengths:
        reader = UnknownLengthReader(
            stream, spec, is_sharded=False, is_training=is_training
        )
        return RankBatches(reader.dataset(), None, reader=reader)
    if math.inf in lengths:
        return RankBatches(without_auto_shard(data), math.inf)
    own = int(lengths[spec.rank] or 0)
    if not is_training:
        return RankBatches(without_auto_shard(checked_length(data, own)), own)
    return _training_batches(stream, spec, [int(length or 0) for length in lengths])


def batches_of_division(
    division: Division, lengths: Sequence[float | None], batch_size: int | None
) -> int | None:
    """Batches of one process in a pass, if each row has become one row of a batch.

    Args:
        division: How the data was divided.
        lengths: Batches of each rank in a pass.
        batch_size: Rows of a batch; `None` if unknown.

    Returns:
        The number, or `None` if rows were left out or added after the division.
    """
    length = finite_or_none(division.length)
    rows = 1 if division.has_batches else batch_size
    if length is None or rows is None or None in lengths or division.is_by_file:
        return None
    counts = [division.rows_of(rank, length) for rank in range(division.size)]
    if lengths == tuple(-(-count // rows) for count in counts):
        return -(-length // rows)
    if lengths == tuple(count // rows for count in counts):  # `drop_remainder`
        return length // rows
    return None


def _training_batches(
    stream: Stream, spec: ShardSpec, lengths: list[int]
) -> RankBatches:
    """This rank's batches of known number, as many as each other rank trains on."""
    data, own, steps = stream.data, lengths[spec.rank], min(lengths)
    if max(lengths) > steps + 1:
        raise ValueError(
            "The ranks have different numbers of batches. Received: "
            f"{_shown(lengths)} batches of ranks 0 to {spec.size - 1} in a "
            f"{stream.kind}, divided by `shard`. Leave rows out, and repeat them, "
            "before `shard`: put `filter`, `take`, `skip` and `repeat` above it."
        )

    def equal(dataset: tf.data.Dataset, count: int, needed: int) -> tf.data.Dataset:
        dataset = checked_length(dataset, count)
        return dataset if count == needed else first_steps(dataset, needed)

    whole = equal(data, own, steps)
    rest = _Rest.of(stream, tuple(lengths))
    total = None if rest is None else rest.total
    if rest is None or not (spec.keeps_position and _has_fixed_order(stream)):
        return RankBatches(without_auto_shard(whole), steps, total=total)
    schedule = batch_schedule_of(
        spec.position, length=rest.total, size=spec.size, steps_after=rest.steps_after
    )
    if schedule is None or not schedule.is_within_epoch:
        whole = without_auto_shard(whole)
        return RankBatches(whole, steps, schedule=schedule, total=total)
    skipped = schedule.skipped
    left = equal(
        rest.dataset(skipped, spec.rank),
        rest.batches_after(skipped, spec.rank),
        schedule.first_steps,
    )
    epoch = tf.Variable(schedule.epoch, dtype=tf.int64, trainable=False)
    dataset = rest_and_whole(left, whole, epoch=epoch, schedule=schedule)
    return RankBatches(dataset, steps, epoch=epoch, schedule=schedule, total=total)


@dataclass(frozen=True)
class _Rest:
    """What is left of a pass of which some batches have been read.

    Args:
        division: How the data was divided.
        data: The batches of this rank.
        batch_size: Rows of a batch.
        lengths: Batches of each rank in a pass.
        total: Batches of one process in a pass.
    """

    division: Division
    data: tf.data.Dataset
    batch_size: int
    lengths: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, stream: Stream, lengths: tuple[int, ...]) -> "_Rest | None":
        """`None` if the batches are not those of one process, or may not be."""
        division = stream.division
        rows = 1 if division.has_batches else division.batch_size
        rows = rows or _rows_per_batch(stream.data)
        total = None if rows is None else batches_of_division(division, lengths, rows)
        if rows is None or total is None:
            return None
        return cls(division, stream.data, rows, lengths, total)

    def steps_after(self, skipped: int) -> int:
        """Steps of all ranks, after `skipped` batches of all ranks."""
        self._check(skipped)
        ranks = range(self.division.size)
        return min(self.batches_after(skipped, rank) for rank in ranks)

    def batches_after(self, skipped: int, rank: int) -> int:
        """Batches of one rank, after `skipped` batches of all ranks."""
        if skipped % self.division.size == 0:
            return self.lengths[rank] - skipped // self.division.size
        length = finite_or_none(self.division.length) or 0
        rows = self.division.rows_of(rank, length) - self._rows_read(skipped, rank)
        return rows // self.batch_size if self._drops else -(-rows // self.batch_size)

    def dataset(self, skipped: int, rank: int) -> tf.data.Dataset:
        """The batches of one rank, after `skipped` batches of all ranks."""
        if skipped % self.division.size == 0:
            return self.data.skip(skipped // self.division.size)
        rows = self.data.unbatch().skip(self._rows_read(skipped, rank))
        return rows.batch(self.batch_size, drop_remainder=self._drops)

    @property
    def _drops(self) -> bool:
        return self.total * self.batch_size < (self.division.length or 0)

    def _rows_read(self, skipped: int, rank: int) -> int:
        return self.division.rows_of(rank, skipped * self.batch_size)

    def _check(self, skipped: int) -> None:
        if skipped % self.division.size and self.division.by == "batches":
            raise ValueError(
                "The training cannot go on in the middle of an epoch with data that "
                "`shard` has divided by batch: the batches that are left do not begin "
                f"with one of the first rank. Received: {skipped} batches that were "
                f"read, and {self.division.size} ranks. Start as many ranks as before, "
                'or pass by="rows".'
            )


def _rows_per_batch(dataset: tf.data.Dataset) -> int | None:
    first = keras.tree.flatten(dataset.element_spec)[0]
    return first.shape[0] if first.shape.rank else None


def _has_fixed_order(stream: Stream) -> bool:
    """Whether each pass has the same rows; what a `map` makes of them may be random."""
    if is_reshuffled(stream.data):
        return False
    sources = sources_of(stream.division)
    readings = [stream.fingerprint_of_sources(sources) for _ in range(2)]
    return readings[0] == readings[1]


def _shown(lengths: Sequence[float | None]) -> str:
    return ", ".join("unknown" if one is None else str(one) for one in lengths)
