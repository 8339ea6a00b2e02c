"""One rank's part of the data that is evaluated, whatever its kind."""

from typing import Any

import keras

from keras_dist.data.arrays import (
    Arrays,
    as_arrays,
    in_batches,
    is_arrays,
    shard_validation,
    split_validation,
)
from keras_dist.data.batches import (
    estimated_steps,
    finite_or_none,
    kind_of,
    rank_batches,
)
from keras_dist.data.batches_stream import Stream
from keras_dist.data.feed import KERAS_BATCH_SIZE, Feed, ShardSpec
from keras_dist.data.steps import StepsRule, scaled_steps


def hold_out(
    x: Any, y: Any, sample_weight: Any, validation_split: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Training and validation data, by `validation_split` as of `Model.fit`.

    Returns:
        `(x, y, sample_weight)` for training, and the same for validation.

    Raises:
        ValueError: If the data is not arrays, or one of the two parts would be empty.
    """
    if not is_arrays((x, y, sample_weight)):
        raise ValueError(
            "`validation_split` needs arrays. "
            f"Received: x of type {type(x).__name__}. Pass `validation_data` instead."
        )
    training, validation = split_validation(
        as_arrays(x, y, sample_weight), validation_split
    )
    return (
        (training.x, training.y, training.sample_weight),
        (validation.x, validation.y, validation.sample_weight),
    )


def validation_feed(
    data: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    steps_rule: StepsRule,
    spec: ShardSpec,
) -> Feed:
    """This rank's validation data, as arguments for `Model.evaluate`.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`, or data that comes in batches.
        batch_size: Rows of one rank's batch, or `None` for Keras's default.
        steps: Steps of a script for one process, or `None` for all data.
        steps_rule: How `steps` changes with the number of ranks.
        spec: How data is divided among the ranks.

    Raises:
        ValueError: If there is no row, or `steps` is unusable.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    own_steps = scaled_steps(
        steps_rule,
        steps,
        size=spec.size,
        name="validation_steps_scaling",
        multiples=True,
    )
    arguments = {"x": x, "y": y, "sample_weight": sample_weight}
    if not is_arrays(tuple(arguments.values())) and x is not None:
        return _stream_feed(arguments, batch_size, steps, own_steps, spec)
    if spec.size == 1 or spec.shard == "none":
        return Feed(
            arguments,
            kind="arrays, already split" if spec.size > 1 else "arrays",
            batch_size=batch_size,
            num_rows=len(keras.tree.flatten(x)[0]),
            is_scaled=steps is not None,
            steps_before=steps,
            steps=own_steps,
        )
    return _sharded_feed(
        as_arrays(x, y, sample_weight), batch_size, steps, own_steps, spec
    )


def _sharded_feed(
    arrays: Arrays,
    batch_size: int | None,
    steps_before: int | None,
    steps: int | None,
    spec: ShardSpec,
) -> Feed:
    """Arrays of which this rank evaluates its rows."""
    if arrays.num_rows == 0:
        raise ValueError(
            "There is nothing to validate on. Received: arrays without rows. "
            "Pass at least one row, or no `validation_data`."
        )
    own = shard_validation(arrays, rank=spec.rank, size=spec.size)
    steps_per_pass = -(-own.num_rows // (batch_size or KERAS_BATCH_SIZE))
    arguments = {"x": own.x, "y": own.y, "sample_weight": own.sample_weight}
    if own.is_on_disk:
        dataset = in_batches(own, batch_size or KERAS_BATCH_SIZE)
        arguments = {"x": dataset, "y": None, "sample_weight": None}
    return Feed(
        arguments,
        kind="arrays, sharded by row",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        rank_rows=own.num_rows,
        is_scaled=steps_before is not None,
        steps_before=steps_before
        or -(-arrays.num_rows // (batch_size or KERAS_BATCH_SIZE)),
        steps=min(steps or steps_per_pass, steps_per_pass),
        has_rows=spec.rank < arrays.num_rows,
        facts={"the number of validation rows": arrays.num_rows},
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
    is_sharded = spec.same.get("validation", False)
    own = rank_batches(stream, spec, is_sharded=is_sharded, is_training=False)
    steps_of_pass = estimated_steps(own, stream, spec, is_sharded=is_sharded)
    return Feed(
        arguments | {"x": own.data},
        kind=kind_of(stream, spec, "validation", is_sharded=is_sharded),
        batch_size=batch_size,
        is_scaled=steps_before is not None,
        steps_before=steps_before or finite_or_none(stream.length),
        steps=min(filter(None, (steps, steps_of_pass)), default=None),
        # With `steps`, a rank that has fewer rows left makes fewer of them.
        is_exact=own.length is not None and stream.division is None or spec.size == 1,
        has_rows=own.has_rows,
        leftover=own.leftover,
        reader=own.reader,
        stream=stream,
    )
