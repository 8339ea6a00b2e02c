"""The share of one rank in the data that is evaluated."""

from typing import Any

import keras

from keras_dist import scaling
from keras_dist.sharding.arrays import (
    as_arrays,
    deal_validation,
    is_arrays,
    split_validation,
)
from keras_dist.sharding.feed import KERAS_BATCH_SIZE, Feed, Split


def hold_out(
    x: Any, y: Any, sample_weight: Any, validation_split: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Training and validation data of `validation_split`, before any is dealt."""
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
    steps_rule: scaling.StepsRule,
    split: Split,
) -> Feed:
    """This rank's share of the data that is evaluated.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`, or data that comes in batches.
        batch_size: Rows of one rank's batch.
        steps: Steps that a script for one process asked for, or `None` for all.
        steps_rule: What happens to them.
        split: How data is divided.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    after = scaling.scaled_steps(
        steps_rule,
        steps,
        size=split.size,
        name="validation_steps_scaling",
        multiples=True,
    )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    if split.size == 1 or split.shard == "none" or not is_arrays(tuple(given.values())):
        kind = "arrays" if is_arrays(x) else type(x).__name__.lstrip("_")
        return Feed(
            given,
            kind=kind + ", taken as already split" * (split.size > 1),
            batch_size=batch_size,
            num_rows=len(keras.tree.flatten(x)[0]) if is_arrays(x) else None,
            is_scaled=steps is not None,
            steps_before=steps,
            steps=after,
        )
    arrays = as_arrays(x, y, sample_weight)
    if arrays.num_rows == 0:
        raise ValueError(
            "There is nothing to validate on. Received: arrays without rows. "
            "Pass at least one row, or no `validation_data`."
        )
    own = deal_validation(arrays, rank=split.rank, size=split.size)
    in_a_pass = -(-own.num_rows // (batch_size or KERAS_BATCH_SIZE))
    return Feed(
        {"x": own.x, "y": own.y, "sample_weight": own.sample_weight},
        kind="arrays, dealt row by row",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        rank_rows=own.num_rows,
        is_scaled=steps is not None,
        steps_before=steps or -(-arrays.num_rows // (batch_size or KERAS_BATCH_SIZE)),
        steps=min(after or in_a_pass, in_a_pass),
        has_rows=split.rank < arrays.num_rows,
        facts={"the number of validation rows": arrays.num_rows},
    )
