"""One rank's part of data that comes in batches, whatever type it has."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data import leftover
from keras_dist.data.batches_divided import divided_batches
from keras_dist.data.batches_known_length import (
    checked_length,
    known_tail_rows,
    rows_of_batches,
    shard_dataset,
    without_auto_shard,
)
from keras_dist.data.batches_schedule import (
    batch_schedule_of,
    rest_and_whole,
)
from keras_dist.data.batches_sequence import ShardedSequence
from keras_dist.data.batches_stream import Stream, finite_or_none
from keras_dist.data.batches_unknown_length import UnknownLengthReader
from keras_dist.data.feed import Feed, RankBatches, ShardSpec
from keras_dist.data.pipeline import ending_like_known, is_reshuffled

# Stands in TensorFlow's error, and in ours, where a pass has another number of batches
# than the data set's cardinality says.
_WRONG_LENGTH = re.compile(r"expected to contain .* but contained[^\[{]*")


def rank_batches(
    stream: Stream,
    spec: ShardSpec,
    *,
    is_sharded: bool,
    is_training: bool,
    shuffle: bool = False,
) -> RankBatches:
    """This rank's batches: a shard, or all batches if the data is already split.

    Args:
        stream: The user's data.
        spec: How data is divided among the ranks.
        is_sharded: Whether all ranks have the same batches, which are sharded round
            robin; else all batches of `stream` belong to this rank.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a `PyDataset` is read in another order each epoch.

    Raises:
        ValueError: If there are fewer rows to train on than ranks, or no row to
            evaluate.
    """
    data = stream.data
    if stream.division is not None and spec.size > 1:
        return divided_batches(stream, spec, is_training=is_training)
    keeps_position = is_training and spec.keeps_position and _has_fixed_order(stream)
    if spec.size == 1 and not keeps_position:
        return RankBatches(data, stream.length)
    name = "training" if is_training else "validation"
    rule = leftover.rule_of(stream, spec, name) if is_sharded else "cut"
    if is_sharded:
        # All rows of the data, or batches, counted only if these may be too few.
        rows = None
        if stream.is_short(spec.size):
            rows = stream.num_first_rows(spec.size)
            if rule in ("whole", "drop"):
                rows = len(stream.first(spec.size))
        needed = 1 if rule == "whole" else spec.size
        if rows is not None and rows < needed and is_training:
            unit = "batches" if rule == "drop" else "rows"
            raise _too_few_rows(stream, f"{rows} {unit}", spec)
        if rows == 0:
            raise ValueError(
                f"There is nothing to validate on. Received: a {stream.kind} without "
                "rows. Pass at least one row, or no `validation_data`."
            )
        if rows is not None and rows <= spec.rank:
            return RankBatches(_one_row(stream, rule), 1, has_rows=False)
        if isinstance(data, keras.utils.PyDataset):
            sharded = ShardedSequence(stream, spec, is_training, shuffle, rule)
            return RankBatches(
                sharded,
                sharded.length,
                epoch=sharded,
                schedule=sharded.schedule,
                is_marked=sharded.is_marked,
                leftover=sharded.leftover,
            )
        if isinstance(data, tf.data.Dataset) and stream.length is not None:
            return _round_robin_dataset(stream, spec, is_training, keeps_position, rule)
    elif stream.length is not None:
        return RankBatches(_checked(data, stream.length), stream.length)
    reader = UnknownLengthReader(
        stream, spec, is_sharded=is_sharded, is_training=is_training, rule=rule
    )
    return RankBatches(
        reader.dataset(),
        None,
        reader=reader,
        is_marked=reader.is_marked,
        leftover=leftover.in_words(rule, None) if is_sharded else "",
    )


@contextlib.contextmanager
def reading(feeds: Sequence[Feed]) -> Iterator[None]:
    """Inside the block, errors and warnings about data are those of the user's data.

    TensorFlow reads the data in a thread and wraps an error of the user's generator in
    a long error of its own: here the original error is raised. Keras warns when data
    ends before the expected number of steps: the warning is hidden if that number was
    an estimate.
    """
    with warnings.catch_warnings():
        if not all(feed.is_exact for feed in feeds):
            warnings.filterwarnings("ignore", "Your input ran out of data")
        try:
            yield
        except tf.errors.OpError as error:
            original = own_error(feeds, error)
            if original is error:
                raise
            raise original from None


def own_error(feeds: Sequence[Feed], error: Exception) -> Exception:
    """The error that the user's data raised, if `error` is TensorFlow's wrapping."""
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


def estimated_steps(
    own: RankBatches, stream: Stream, spec: ShardSpec, *, is_sharded: bool
) -> int | None:
    """Steps of a pass, exact if `own.length` is known; `None` if unknown or infinite.

    It is an estimate, one too high at most, where the last step is left out if its
    batches have too few rows: how many they have is not known beforehand.
    """
    if own.length is not None or stream.length is None:
        return finite_or_none(own.length)
    return math.ceil(stream.length / (spec.size if is_sharded else 1))


def kind_of(stream: Stream, spec: ShardSpec, name: str, *, is_sharded: bool) -> str:
    """The type of the data and how it is sharded, in the words of the plan.

    Args:
        stream: The data.
        spec: How data is divided among the ranks.
        name: "training" or "validation".
        is_sharded: Whether the batches are sharded over the ranks.
    """
    if spec.size == 1:
        return stream.kind
    if stream.division is not None:
        if stream.division.by == "source":
            return f"{stream.kind}, sharded at its source by TensorFlow, by file"
        unit = {"rows": "row", "batches": "batch", "files": "file"}[stream.division.by]
        return f"{stream.kind}, sharded before decoding, by {unit}"
    if is_sharded:
        note = spec.notes.get(name, "")
        if stream.is_declared and isinstance(stream.data, keras.utils.PyDataset):
            return f"{stream.kind}, sharded before decoding, by batch"
        if spec.shard == "source" and isinstance(stream.data, tf.data.Dataset):
            note = f" (TensorFlow finds nothing that reads files){note}"
        if makes_all_batches(stream, spec, is_sharded=is_sharded):
            note = f"; every rank makes all of them{note}"
        return f"{stream.kind}, sharded by batch, round robin{note}"
    reason = ": the ranks' batches differ" if spec.shard != "none" else ""
    return f"{stream.kind}, already split{reason}"


def makes_all_batches(stream: Stream, spec: ShardSpec, *, is_sharded: bool) -> bool:
    """Whether each rank makes the batches of all ranks, and leaves out the others'."""
    is_sequence = isinstance(stream.data, keras.utils.PyDataset)
    return spec.size > 1 and is_sharded and not is_sequence


def _round_robin_dataset(
    stream: Stream,
    spec: ShardSpec,
    is_training: bool,
    keeps_position: bool,
    rule: str,
) -> RankBatches:
    """This rank's batches of a `tf.data.Dataset` of known or infinite length."""
    data, length = stream.data, stream.length or 0
    tail = 0 if length == math.inf else int(length) % spec.size
    is_marked = (
        is_training
        and rule in ("whole", "either")
        and (tail > 0 or (spec.position is not None and length != math.inf))
    )
    shard = functools.partial(
        shard_dataset,
        rank=spec.rank,
        size=spec.size,
        is_training=is_training,
        rule=rule,
        is_marked=is_marked,
    )
    ranked = functools.partial(
        RankBatches, is_marked=is_marked, leftover=leftover.in_words(rule, tail)
    )
    dataset = shard(data, length=length)
    if length == math.inf:
        return RankBatches(without_auto_shard(dataset), math.inf)

    def steps_after(skipped: int) -> int | None:
        left = int(length) - skipped
        if rule in ("whole", "drop"):
            has_tail = left % spec.size > (0 if is_training else spec.rank)
            return left // spec.size + (has_tail and rule == "whole")
        tail_rows = known_tail_rows(data, length=left, size=spec.size)
        # The last batch may be smaller, and the tail then have no row for some rank.
        rows_needed = spec.size if is_training else spec.rank + 1
        if tail_rows is None:
            return None
        return left // spec.size + (tail_rows >= rows_needed)

    steps = steps_after(0)
    if steps is None:
        if stream.has_seeded_passes:
            made = functools.partial(leftover.marked, has_rows=True)
            as_made = {"as_made": made} if is_marked else {}
            dataset = ending_like_known(dataset, data, **as_made)
        return ranked(without_auto_shard(dataset), None)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    if not keeps_position:
        return ranked(without_auto_shard(dataset), steps)
    lengths = {"length": int(length), "size": spec.size}
    schedule = batch_schedule_of(spec.position, steps_after=steps_after, **lengths)
    if schedule is None or not schedule.is_within_epoch:
        return ranked(without_auto_shard(dataset), steps, schedule=schedule)
    rest = shard(data.skip(schedule.skipped), length=length - schedule.skipped)
    epoch = tf.Variable(schedule.epoch, dtype=tf.int64, trainable=False)
    dataset = rest_and_whole(rest, dataset, epoch=epoch, schedule=schedule)
    return ranked(dataset, steps, epoch=epoch, schedule=schedule)


def _checked(data: Any, length: float) -> Any:
    is_finite = isinstance(data, tf.data.Dataset) and length != math.inf
    return checked_length(data, int(length)) if is_finite else data


def _has_fixed_order(stream: Stream) -> bool:
    """Whether each pass yields the same batches, so that a rank can skip some of them.

    Without that, a training cannot be resumed in the middle of an epoch.
    """
    if isinstance(stream.data, keras.utils.PyDataset):
        return True
    is_known = stream.length is not None and stream.length != math.inf
    if not (isinstance(stream.data, tf.data.Dataset) and is_known):
        return False
    if is_reshuffled(stream.data):
        return False
    return stream.fingerprint(1) == stream.fingerprint(1)


def _one_row(stream: Stream, rule: str) -> tf.data.Dataset:
    """A row of another rank, or a batch where it cannot be cut."""
    row = stream.as_read(stream.first(1)[0])
    if rule not in ("whole", "drop"):
        row = rows_of_batches([row], rank=0, size=2**30)
    return tf.data.Dataset.from_tensors(row)


def _too_few_rows(stream: Stream, found: str, spec: ShardSpec) -> ValueError:
    return ValueError(
        f"Each rank needs at least one row. Received: {found} in a "
        f"{stream.kind} for {spec.size} ranks. Pass more data, or start fewer "
        "processes."
    )
