"""The share of one rank in the data that is trained on."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import scaling
from keras_dist.sharding.arrays import (
    Arrays,
    as_arrays,
    find_rows,
    is_arrays,
    is_ragged_or_sparse,
    shard_training,
)
from keras_dist.sharding.arrays_order import Order, batches_at
from keras_dist.sharding.arrays_rows import (
    left_out_rows,
    rows_of_rank,
    rows_of_step,
    steps_of_rows,
)
from keras_dist.sharding.arrays_schedule import epoch_schedule_of
from keras_dist.sharding.batches import (
    RankBatches,
    finite,
    kind_of,
    rank_batches,
    steps_of,
)
from keras_dist.sharding.batches_sequence import ShardedSequence
from keras_dist.sharding.batches_stream import Stream
from keras_dist.sharding.feed import KERAS_BATCH_SIZE, Feed, Split


def training_feed(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    shuffle: bool | str,
    steps_per_epoch: int | None,
    steps_rule: scaling.StepsRule,
    split: Split,
) -> Feed:
    """This rank's training data.

    Raises:
        ValueError: If there is no data, there are fewer rows than ranks, or the number
            of steps cannot be known beforehand.
    """
    if x is None:
        raise ValueError(
            "There is no data to train on. Received: x=None. Pass arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator as `x`."
        )
    given = {"x": x, "y": y, "sample_weight": sample_weight, "shuffle": shuffle}
    steps = scaling.scaled_steps(steps_rule, steps_per_epoch, size=split.size)
    if not is_arrays((x, y, sample_weight)):
        return _stream_feed(given, batch_size, steps_per_epoch, steps, split)
    arrays = as_arrays(x, y, sample_weight)
    _check_rows(arrays, split)
    # Keras's own default: 32, or as many rows as the steps need.
    own_size = -(-arrays.num_rows // steps_per_epoch) if steps_per_epoch else None
    batch_size = _checked_batch_size(batch_size or own_size or KERAS_BATCH_SIZE)
    given |= {"batch_size": batch_size, "steps_per_epoch": steps}
    is_sharded = split.size > 1 or split.keeps_position
    if not is_sharded or split.shard == "none":
        return _own_arrays_feed(given, arrays, steps_per_epoch, split)
    return _sharded_feed(given, arrays, steps_per_epoch, split)


def _sharded_feed(
    given: dict[str, Any], arrays: Arrays, steps_before: int | None, split: Split
) -> Feed:
    batch_size, shuffle = given["batch_size"], given["shuffle"]
    num_rows = arrays.num_rows
    sizes = {"batch_size": batch_size, "size": split.size}
    steps = given["steps_per_epoch"] or steps_of_rows(num_rows, **sizes)
    epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
    whole = functools.partial(rows_of_step, num_rows=num_rows, **sizes)
    schedule = epoch_schedule_of(
        split.position, num_rows=num_rows, steps=steps, **sizes
    )
    order = Order(schedule, rank=split.rank, shuffle=shuffle, seed=split.seed)
    dataset = shard_training(arrays, order, epoch=epoch)
    return Feed(
        # The data set has it all: Keras takes none of these beside one.
        dict.fromkeys(["y", "sample_weight", "batch_size", "steps_per_epoch"])
        | {"x": dataset, "shuffle": False},
        kind="arrays, dealt row by row, " + ("shuffled" if shuffle else "in order"),
        batch_size=batch_size,
        num_rows=num_rows,
        rank_rows=rows_of_rank(num_rows, rank=split.rank, **sizes),
        left_out=left_out_rows(num_rows, **sizes),
        is_scaled=steps_before is not None,
        steps_before=steps_before or -(-num_rows // batch_size),
        steps=steps,
        is_exact=not schedule.is_within_epoch,
        epoch=epoch,
        schedule=schedule,
        rows_of_all=schedule.rows_of_step if split.position else whole,
        rows_at=lambda number, step, _: order.rows_at(number, step),
        facts={
            "the number of rows": num_rows,
            "the shapes of the rows": arrays.row_shapes(),
            "the batch size": batch_size,
            "the steps of an epoch": steps,
        },
    )


def _own_arrays_feed(
    given: dict[str, Any], arrays: Arrays, steps_before: int | None, split: Split
) -> Feed:
    batch_size, steps = given["batch_size"], given["steps_per_epoch"]
    in_a_pass = -(-arrays.num_rows // batch_size)
    return Feed(
        given,
        kind="arrays, already split" if split.size > 1 else "arrays",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        is_scaled=steps_before is not None,
        steps_before=steps_before,
        steps=min(steps or in_a_pass, in_a_pass),
        rows_at=lambda _, __, batch: find_rows(arrays, batch),
        facts={
            "the shapes of the rows": arrays.row_shapes(),
            "the batches of a pass over its rows": in_a_pass,
            "the steps of an epoch": steps,
        },
    )


def _stream_feed(
    given: dict[str, Any],
    batch_size: int | None,
    steps_before: int | None,
    steps: int | None,
    split: Split,
) -> Feed:
    stream = Stream.of(given["x"])
    _check_stream(stream, given, steps, split)
    is_sharded = split.same.get("training", split.size == 1 and split.keeps_position)
    shuffle = bool(given["shuffle"])
    own = rank_batches(
        stream, split, is_sharded=is_sharded, is_training=True, shuffle=shuffle
    )
    is_keras_to_shuffle = (
        shuffle
        and own.data is stream.data
        and isinstance(own.data, keras.utils.PyDataset)
    )
    known = finite(own.length)
    schedule = own.schedule if steps is None else None
    about = steps_of(own, stream, split, is_sharded=is_sharded)
    return Feed(
        given
        | {"x": own.data, "batch_size": batch_size, "steps_per_epoch": steps}
        | {"shuffle": is_keras_to_shuffle},
        kind=kind_of(stream, split, is_sharded=is_sharded),
        batch_size=batch_size,
        is_scaled=steps_before is not None,
        steps_before=steps_before or finite(stream.length),
        steps=min(filter(None, (steps, about)), default=None),
        is_exact=(own.length is not None or split.size == 1)
        and not (schedule is not None and schedule.is_within_epoch),
        # Where an epoch is no pass, Keras reads ahead into the next one.
        epoch=own.epoch if steps is None else None,
        schedule=schedule,
        reader=own.reader,
        batches_at=_batches_at(own, stream, steps, split, is_sharded, shuffle),
        facts={
            "the batches of a pass over its data": known,
            "the steps of an epoch": steps,
            "whether the data can be read from the middle": schedule is not None,
        },
    )


def _batches_at(
    own: RankBatches,
    stream: Stream,
    steps: int | None,
    split: Split,
    is_sharded: bool,
    shuffle: bool,
) -> Callable[[int, int], Sequence[int]] | None:
    """Batches that this rank reads in an epoch at a step, where anybody knows."""
    if isinstance(own.data, ShardedSequence):
        return own.data.batches_at
    if shuffle and isinstance(own.data, keras.utils.PyDataset):
        return None  # Keras draws an order
    total = finite(stream.length)

    def batches(epoch: int, step: int) -> Sequence[int]:
        # With `steps_per_epoch` an epoch goes on where the one before has ended.
        position = epoch * (steps or 0) + step
        skipped = own.schedule.skipped_in(epoch) if own.schedule else 0
        if steps and own.length is not None and finite(own.length):
            position %= int(own.length)
        return batches_at(
            position, total=total, split=split, is_sharded=is_sharded, skipped=skipped
        )

    return batches


def _check_stream(
    stream: Stream, given: dict[str, Any], steps: int | None, split: Split
) -> None:
    if split.size > 1 and split.shard == "auto" and is_ragged_or_sparse(given):
        raise ValueError(
            "Ragged and sparse tensors cannot be dealt to the ranks. Received: x of "
            f"type {stream.kind}. Pass dense arrays, or split the data yourself "
            'and pass shard="none" with a tf.data.Dataset.'
        )
    if stream.length == 0:
        raise ValueError(
            "There is no data to train on. Received: "
            f"x of type {stream.kind} without a batch."
        )
    if split.size > 1 and stream.length == math.inf and steps is None:
        raise ValueError(
            "An epoch of endless data has no end. Received: "
            f"x of type {stream.kind} without end, steps_per_epoch=None. "
            "Pass `steps_per_epoch`."
        )


def _check_rows(arrays: Arrays, split: Split) -> None:
    if arrays.num_rows == 0:
        raise ValueError(
            "There is no data to train on. Received: arrays of 0 rows. Pass at least "
            "one row for each rank."
        )
    if split.shard == "auto" and arrays.num_rows < split.size:
        raise ValueError(
            "Each rank needs at least one row. "
            f"Received: {arrays.num_rows} rows for {split.size} ranks. "
            f"Pass more data, or start at most {arrays.num_rows} processes."
        )


def _checked_batch_size(batch_size: Any) -> int:
    if not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ValueError(
            "`batch_size`, the rows of one rank's batch, must be a whole number of at "
            f"least 1. Received: batch_size={batch_size!r}"
        )
    return int(batch_size)
