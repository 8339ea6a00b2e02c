"""One rank's batches of data that comes in batches."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_dist.sharding.batches_known_length import (
    checked_length,
    known_rows_left,
    rows_of_batches,
    shard_dataset,
    unsharded,
)
from keras_dist.sharding.batches_schedule import (
    BatchSchedule,
    batch_schedule_of,
    rest_and_whole,
)
from keras_dist.sharding.batches_sequence import ShardedSequence
from keras_dist.sharding.batches_stream import Stream, standardized
from keras_dist.sharding.batches_unknown_length import UnknownLengthReader
from keras_dist.sharding.feed import Feed, Split

# Stands in TensorFlow's error, and in ours, where a pass has another number of batches
# than the data set's cardinality says.
_WRONG_LENGTH = re.compile(r"expected to contain .* but contained[^\[{]*")


@dataclass(frozen=True)
class RankBatches:
    """What one rank reads.

    Args:
        data: In a form that Keras takes.
        length: Batches in a pass; `math.inf` or, where nobody can say, `None`.
        epoch: What is told the number of each epoch by `assign`, if anything is.
        schedule: Which batches come when, where a training can go on in an epoch.
        reader: What reads the batches in Python, if anything does.
        has_rows: `False` if another rank's row stands in, which must not count.
    """

    data: Any
    length: float | None
    epoch: Any = None
    schedule: BatchSchedule | None = None
    reader: UnknownLengthReader | None = None
    has_rows: bool = True


def rank_batches(
    stream: Stream,
    split: Split,
    *,
    is_sharded: bool,
    is_training: bool,
    shuffle: bool = False,
) -> RankBatches:
    """This rank's batches: its part, or all where the data is already split.

    Args:
        stream: The data.
        split: How data is divided.
        is_sharded: Whether all ranks have the same batches, to be dealt in turn.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a sequence is read in another order each epoch.

    Raises:
        ValueError: If there is less than one row for each rank to train on.
    """
    data = stream.data
    keeps_position = is_training and split.keeps_position and _has_fixed_order(stream)
    if split.size == 1 and not keeps_position:
        return RankBatches(data, stream.length)
    if is_sharded:
        few = stream.num_first_rows(split.size) if stream.is_short(split.size) else None
        if few is not None and few < split.size and is_training:
            raise _too_few(stream, few, split)
        if few == 0:
            raise ValueError(
                f"There is nothing to validate on. Received: a {stream.kind} without "
                "rows. Pass at least one row, or no `validation_data`."
            )
        if few is not None and few <= split.rank:
            return RankBatches(_one_row(stream), 1, has_rows=False)
        if isinstance(data, keras.utils.PyDataset):
            sharded = ShardedSequence(stream, split, is_training, shuffle)
            return RankBatches(
                sharded, sharded.length, epoch=sharded, schedule=sharded.schedule
            )
        if isinstance(data, tf.data.Dataset) and stream.length is not None:
            return _round_robin_dataset(stream, split, is_training, keeps_position)
    elif stream.length is not None:
        return RankBatches(_checked(data, stream.length), stream.length)
    reader = UnknownLengthReader(
        stream, split, is_sharded=is_sharded, is_training=is_training
    )
    return RankBatches(reader.dataset(), None, reader=reader)


@contextlib.contextmanager
def reading(feeds: Sequence[Feed]) -> Iterator[None]:
    """Inside the block, the end and the errors of data are what the user expects.

    TensorFlow, which reads the data in a thread, makes a page of its own of an error of
    the user's; and Keras warns of the end of data whose length it did not know.
    """
    with warnings.catch_warnings():
        if not all(feed.is_exact for feed in feeds):
            warnings.filterwarnings("ignore", "Your input ran out of data")
        try:
            yield
        except tf.errors.OpError as error:
            own = own_error(feeds, error)
            if own is error:
                raise
            raise own from None


def own_error(feeds: Sequence[Feed], error: Exception) -> Exception:
    """What the user's data raised, where `error` is what TensorFlow made of it."""
    if not isinstance(error, tf.errors.OpError):
        return error
    for feed in feeds:
        if feed.reader is not None and feed.reader.failure is not None:
            return feed.reader.failure
    if found := _WRONG_LENGTH.search(error.message):
        return RuntimeError(
            "A pass over the data gave another number of batches than the data set's "
            f"cardinality says. Received: a pass {found[0].strip().rstrip('.')}. A "
            "cache that was filled by an iterator that stopped midway has too few "
            "batches; so has a data set with a wrong `assert_cardinality`. Make the "
            "data set anew before this call."
        )
    return error


def steps_of(
    own: RankBatches, stream: Stream, split: Split, *, is_sharded: bool
) -> int | None:
    """Steps of a pass: exactly, or about so many; `None` where nobody can say."""
    if own.length is not None or stream.length is None:
        return finite(own.length)
    return math.ceil(stream.length / (split.size if is_sharded else 1))


def finite(length: float | None) -> int | None:
    """A number of batches, or `None` where there is none that is known.

    >>> finite(3), finite(None), finite(math.inf)
    (3, None, None)
    """
    return None if length is None or length == math.inf else int(length)


def kind_of(stream: Stream, split: Split, *, is_sharded: bool) -> str:
    """What becomes of the data, in words for the plan."""
    if split.size == 1:
        return stream.kind
    if is_sharded:
        return f"{stream.kind}, batches dealt in turn"
    reason = ": the ranks' batches differ" if split.shard == "auto" else ""
    return f"{stream.kind}, taken as already split{reason}"


def _round_robin_dataset(
    stream: Stream, split: Split, is_training: bool, keeps_position: bool
) -> RankBatches:
    data, length = stream.data, stream.length or 0
    shard = functools.partial(
        shard_dataset, rank=split.rank, size=split.size, is_training=is_training
    )
    dataset = shard(data, length=length)
    if length == math.inf:
        return RankBatches(unsharded(dataset), math.inf)

    def steps_after(skipped: int) -> int | None:
        rest = int(length) - skipped
        left = known_rows_left(data, length=rest, size=split.size)
        # The last batch may be shorter, and leave no row for some rank.
        needed = split.size if is_training else split.rank + 1
        return None if left is None else rest // split.size + (left >= needed)

    steps = steps_after(0)
    if steps is None:
        return RankBatches(unsharded(dataset), None)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    if not keeps_position:
        return RankBatches(unsharded(dataset), steps)
    lengths = {"length": int(length), "size": split.size}
    schedule = batch_schedule_of(split.position, steps_after=steps_after, **lengths)
    if schedule is None or not schedule.is_within_epoch:
        return RankBatches(unsharded(dataset), steps, schedule=schedule)
    rest = shard(data.skip(schedule.skipped), length=length - schedule.skipped)
    epoch = tf.Variable(schedule.epoch, dtype=tf.int64, trainable=False)
    chosen = rest_and_whole(rest, dataset, epoch=epoch, schedule=schedule)
    return RankBatches(chosen, steps, epoch=epoch, schedule=schedule)


def _checked(data: Any, length: float) -> Any:
    is_finite = isinstance(data, tf.data.Dataset) and length != math.inf
    return checked_length(data, int(length)) if is_finite else data


def _has_fixed_order(stream: Stream) -> bool:
    """Whether a batch is always at the same place: else an epoch has no middle."""
    if isinstance(stream.data, keras.utils.PyDataset):
        return True
    is_known = stream.length is not None and stream.length != math.inf
    if not (isinstance(stream.data, tf.data.Dataset) and is_known):
        return False
    return stream.fingerprint(1) == stream.fingerprint(1)


def _one_row(stream: Stream) -> tf.data.Dataset:
    first = standardized(stream.first(1)[0])
    row = rows_of_batches([first], rank=0, size=2**30)
    return tf.data.Dataset.from_tensors(row)


def _too_few(stream: Stream, num_rows: int, split: Split) -> ValueError:
    return ValueError(
        f"Each rank needs at least one row. Received: {num_rows} rows in a "
        f"{stream.kind} for {split.size} ranks. Pass more data, or start fewer "
        "processes."
    )
