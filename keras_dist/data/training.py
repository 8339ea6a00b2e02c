"""One rank's part of the training data, whatever its kind."""

import dataclasses
import functools
import math
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data.arrays import (
    Arrays,
    as_arrays,
    find_rows,
    is_arrays,
    is_ragged_or_sparse,
    shard_training,
    weights_of_rows,
)
from keras_dist.data.arrays_order import Order
from keras_dist.data.arrays_rows import (
    left_out_rows,
    rows_of_rank,
    rows_of_step,
    steps_of_rows,
)
from keras_dist.data.arrays_schedule import epoch_schedule_of
from keras_dist.data.batches import (
    RankBatches,
    estimated_steps,
    finite_or_none,
    kind_of,
    makes_all_batches,
    rank_batches,
)
from keras_dist.data.batches_indices import batch_indices
from keras_dist.data.batches_stream import Stream
from keras_dist.data.feed import KERAS_BATCH_SIZE, Feed, ShardSpec
from keras_dist.data.pipeline import skip_epochs
from keras_dist.data.steps import StepsRule, scaled_steps


def training_feed(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    class_weight: dict[int, float] | None = None,
    batch_size: int | None,
    shuffle: bool | str,
    steps_per_epoch: int | None,
    steps_rule: StepsRule,
    spec: ShardSpec,
) -> Feed:
    """This rank's training data, as arguments for `Model.fit`.

    Args:
        x: Inputs: arrays, or data that comes in batches.
        y: Targets, or `None`.
        sample_weight: Weights of the rows, or `None`.
        class_weight: Weights of the classes, as of `Model.fit`, or `None`.
        batch_size: Rows of one rank's batch, or `None` for Keras's default.
        shuffle: As of `Model.fit`.
        steps_per_epoch: Steps of a script for one process, or `None` for all data.
        steps_rule: How `steps_per_epoch` changes with the number of ranks.
        spec: How data is divided among the ranks.

    Raises:
        ValueError: If there is no data, there are fewer rows than ranks, or the data is
            infinite and `steps_per_epoch` is not given.
    """
    if x is None:
        raise ValueError(
            "There is no data to train on. Received: x=None. Pass arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator as `x`."
        )
    arguments = {"x": x, "y": y, "sample_weight": sample_weight, "shuffle": shuffle}
    steps = scaled_steps(steps_rule, steps_per_epoch, size=spec.size)
    if not is_arrays((x, y, sample_weight)):
        return _stream_feed(arguments, batch_size, steps_per_epoch, steps, spec)
    arrays = as_arrays(x, y, sample_weight)
    _check_rows(arrays, spec)
    # Keras's default: all rows divided by the steps, or 32.
    per_step = -(-arrays.num_rows // steps_per_epoch) if steps_per_epoch else None
    batch_size = _checked_batch_size(batch_size or per_step or KERAS_BATCH_SIZE)
    arguments |= {"batch_size": batch_size, "steps_per_epoch": steps}
    is_sharded = spec.size > 1 or spec.keeps_position
    if not is_sharded or spec.shard == "none":
        return _unsharded_feed(arguments, arrays, steps_per_epoch, spec)
    has_classes = hasattr(y, "shape") and len(y.shape) <= 2
    if class_weight and has_classes and sample_weight is None:
        weights = weights_of_rows(y, class_weight)
        feed = _sharded_feed(arguments, as_arrays(x, y, weights), steps_per_epoch, spec)
        return dataclasses.replace(
            feed,
            arguments=feed.arguments | {"class_weight": None},
            facts=feed.facts | {"`class_weight`": class_weight},
        )
    return _sharded_feed(arguments, arrays, steps_per_epoch, spec)


def _sharded_feed(
    arguments: dict[str, Any], arrays: Arrays, steps_before: int | None, spec: ShardSpec
) -> Feed:
    """Arrays of which this rank reads its rows."""
    batch_size, shuffle = arguments["batch_size"], arguments["shuffle"]
    num_rows = arrays.num_rows
    sizes = {"batch_size": batch_size, "size": spec.size}
    steps = arguments["steps_per_epoch"] or steps_of_rows(num_rows, **sizes)
    epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
    from_start = functools.partial(rows_of_step, num_rows=num_rows, **sizes)
    schedule = epoch_schedule_of(spec.position, num_rows=num_rows, steps=steps, **sizes)
    order = Order(schedule, rank=spec.rank, shuffle=shuffle, seed=spec.seed)
    dataset = shard_training(arrays, order, epoch=epoch)
    return Feed(
        # They are part of the data set: Keras accepts none of them beside one.
        dict.fromkeys(["y", "sample_weight", "batch_size", "steps_per_epoch"])
        | {"x": dataset, "shuffle": False},
        kind="arrays, sharded by row, " + ("shuffled" if shuffle else "in order"),
        batch_size=batch_size,
        num_rows=num_rows,
        rank_rows=rows_of_rank(num_rows, rank=spec.rank, **sizes),
        left_out=left_out_rows(num_rows, **sizes),
        is_scaled=steps_before is not None,
        steps_before=steps_before or -(-num_rows // batch_size),
        steps=steps,
        is_exact=not schedule.is_within_epoch,
        epoch=epoch,
        schedule=schedule,
        rows_of_all=schedule.rows_of_step if spec.position else from_start,
        rows_at=lambda number, step, _: order.rows_at(number, step),
        facts={
            "the number of rows": num_rows,
            "the shapes of the rows": arrays.row_shapes(),
            "the batch size": batch_size,
            "the steps of an epoch": steps,
        },
    )


def _unsharded_feed(
    arguments: dict[str, Any], arrays: Arrays, steps_before: int | None, spec: ShardSpec
) -> Feed:
    """Arrays of which this rank reads all rows, in the order that Keras draws."""
    batch_size, steps = arguments["batch_size"], arguments["steps_per_epoch"]
    steps_per_pass = -(-arrays.num_rows // batch_size)
    return Feed(
        arguments,
        kind="arrays, already split" if spec.size > 1 else "arrays",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        is_scaled=steps_before is not None,
        steps_before=steps_before,
        steps=min(steps or steps_per_pass, steps_per_pass),
        rows_at=lambda _, __, batch: find_rows(arrays, batch),
        facts={
            "the shapes of the rows": arrays.row_shapes(),
            "the batches of a pass over its rows": steps_per_pass,
            "the steps of an epoch": steps,
        },
    )


def _stream_feed(
    arguments: dict[str, Any],
    batch_size: int | None,
    steps_before: int | None,
    steps: int | None,
    spec: ShardSpec,
) -> Feed:
    """Data that comes in batches."""
    stream = Stream.of(arguments["x"])
    _check_stream(stream, arguments, steps, spec)
    is_sharded = spec.same.get("training", spec.size == 1 and spec.keeps_position)
    shuffle = bool(arguments["shuffle"])
    if stream.has_seeded_passes and steps is None and spec.position is not None:
        skip_epochs(stream.data, spec.position.epoch)
    own = rank_batches(
        stream, spec, is_sharded=is_sharded, is_training=True, shuffle=shuffle
    )
    is_shuffled_by_keras = (
        shuffle
        and own.data is stream.data
        and isinstance(own.data, keras.utils.PyDataset)
    )
    schedule = own.schedule if steps is None else None
    steps_of_pass = estimated_steps(own, stream, spec, is_sharded=is_sharded)
    return Feed(
        arguments
        | {"x": own.data, "batch_size": batch_size, "steps_per_epoch": steps}
        | {"shuffle": is_shuffled_by_keras},
        kind=kind_of(stream, spec, "training", is_sharded=is_sharded),
        batch_size=batch_size or stream.batch_size,
        is_scaled=steps_before is not None,
        steps_before=steps_before or _steps_of_one_process(own, stream, spec),
        steps=min(filter(None, (steps, steps_of_pass)), default=None),
        is_exact=(own.length is not None or spec.size == 1)
        and not (schedule is not None and schedule.is_within_epoch),
        # With `steps_per_epoch` Keras may read ahead, into batches of the next epoch.
        epoch=own.epoch if steps is None else None,
        is_marked=own.is_marked,
        leftover=own.leftover,
        schedule=schedule,
        reader=own.reader,
        stream=stream,
        makes_all_batches=makes_all_batches(stream, spec, is_sharded=is_sharded),
        batches_at=batch_indices(own, stream, steps, spec, is_sharded, shuffle),
        facts={
            "the batches of a pass over its data": finite_or_none(own.length),
            "the steps of an epoch": steps,
            "whether the data can be read from the middle": schedule is not None,
        },
    )


def _steps_of_one_process(
    own: RankBatches, stream: Stream, spec: ShardSpec
) -> int | None:
    is_divided = stream.division is not None and spec.size > 1
    return own.total if is_divided else finite_or_none(stream.length)


def _check_stream(
    stream: Stream, arguments: dict[str, Any], steps: int | None, spec: ShardSpec
) -> None:
    if spec.size > 1 and spec.shard != "none" and is_ragged_or_sparse(arguments):
        raise ValueError(
            "Ragged and sparse tensors cannot be sharded. Received: x of "
            f"type {stream.kind}. Pass dense arrays, or split the data yourself "
            'and pass shard="none" with a tf.data.Dataset.'
        )
    if stream.length == 0:
        raise ValueError(
            "There is no data to train on. Received: "
            f"x of type {stream.kind} without a batch. Pass at least one row for each "
            "rank."
        )
    if spec.size > 1 and stream.length == math.inf and steps is None:
        raise ValueError(
            "An epoch of infinite data needs a number of steps. Received: "
            f"infinite x of type {stream.kind}, steps_per_epoch=None. "
            "Pass `steps_per_epoch`."
        )


def _check_rows(arrays: Arrays, spec: ShardSpec) -> None:
    if arrays.num_rows == 0:
        raise ValueError(
            "There is no data to train on. Received: arrays of 0 rows. Pass at least "
            "one row for each rank."
        )
    if spec.shard != "none" and arrays.num_rows < spec.size:
        raise ValueError(
            "Each rank needs at least one row. "
            f"Received: {arrays.num_rows} rows for {spec.size} ranks. "
            f"Pass more data, or start at most {arrays.num_rows} processes."
        )


def _checked_batch_size(batch_size: Any) -> int:
    if not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ValueError(
            "`batch_size`, the rows of one rank's batch, must be a whole number of at "
            f"least 1. Received: batch_size={batch_size!r}"
        )
    return int(batch_size)
