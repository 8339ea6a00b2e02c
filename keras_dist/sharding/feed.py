"""What one rank gives to Keras in place of the user's data."""

from dataclasses import dataclass, field
from typing import Any

import keras

from keras_dist import scaling
from keras_dist.sharding.arrays import (
    Arrays,
    as_arrays,
    deal_training,
    deal_validation,
    is_arrays,
    is_ragged_or_sparse,
    split_validation,
)
from keras_dist.sharding.rows import left_out_rows, rows_of_rank, steps_of_rows
from keras_dist.sharding.streams import known_steps

_KERAS_BATCH_SIZE = 32


@dataclass(frozen=True)
class Feed:
    """Data of one rank, as arguments for Keras, and what is known of it.

    Args:
        arguments: Keyword arguments for `Model.fit` or `Model.evaluate`.
        kind: What became of the data, in words.
        batch_size: Rows of a batch of one rank, `None` where the data decides it.
        num_rows: Rows of all ranks' data, or of this rank's if it is already split.
        rank_rows: Rows that this rank reads in a pass, where they are dealt.
        left_out: Rows of a pass that no rank reads.
        steps_before: Steps that one process would make, where that is known.
        steps: Steps that this rank makes.
        is_known: Whether the steps cannot turn out fewer.
        has_rows: `False` if another rank's row stands in, which must not count.
        facts: What has to be equal on all ranks.
    """

    arguments: dict[str, Any]
    kind: str
    batch_size: int | None = None
    num_rows: int | None = None
    rank_rows: int | None = None
    left_out: int = 0
    steps_before: int | None = None
    steps: int | None = None
    is_known: bool = True
    has_rows: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """How data is divided among the ranks.

    Args:
        rank: This rank.
        size: Number of ranks.
        shard: `"auto"` to deal arrays row by row, `"none"` if the user has split.
        seed: Of the order of the rows, the same on all ranks.
    """

    rank: int
    size: int
    shard: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shard not in ("auto", "none"):
            raise ValueError(
                '`shard` must be "auto" or "none" (the data is already split). '
                f"Received: shard={self.shard!r}"
            )


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
    batch_size = _checked_batch_size(batch_size or own_size or _KERAS_BATCH_SIZE)
    if split.size == 1 or split.shard == "none":
        given |= {"batch_size": batch_size, "steps_per_epoch": steps}
        return _own_arrays_feed(
            given, arrays, batch_size, steps_per_epoch, steps, split
        )
    sizes = {"batch_size": batch_size, "size": split.size}
    in_a_pass = steps_of_rows(arrays.num_rows, **sizes)
    dataset = deal_training(
        arrays,
        batch_size=batch_size,
        rank=split.rank,
        size=split.size,
        shuffle=shuffle,
        seed=split.seed,
    )
    steps = steps or in_a_pass
    return Feed(
        # The data set has it all: Keras takes none of these beside one.
        dict.fromkeys(["y", "sample_weight", "batch_size"])
        | {"x": dataset, "steps_per_epoch": steps, "shuffle": False},
        kind="arrays, dealt row by row, " + ("shuffled" if shuffle else "in order"),
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        rank_rows=rows_of_rank(arrays.num_rows, rank=split.rank, **sizes),
        left_out=left_out_rows(arrays.num_rows, **sizes),
        steps_before=steps_per_epoch or -(-arrays.num_rows // batch_size),
        steps=steps,
        facts={
            "the number of rows": arrays.num_rows,
            "the shapes of the rows": arrays.row_shapes(),
            "the batch size": batch_size,
            "the steps of an epoch": steps,
        },
    )


def validation_feed(
    data: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    steps_rule: scaling.StepsRule,
    split: Split,
    name: str = "validation_steps_scaling",
) -> Feed:
    """This rank's share of the data that is evaluated.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`, or data that comes in batches.
        batch_size: Rows of one rank's batch.
        steps: Steps that a script for one process asked for, or `None` for all.
        steps_rule: What happens to them.
        split: How data is divided.
        name: Name of the rule's argument, for errors.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    after = scaling.scaled_steps(
        steps_rule, steps, size=split.size, name=name, multiples=True
    )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    if split.size == 1 or split.shard == "none" or not is_arrays(tuple(given.values())):
        is_split = split.size > 1
        return Feed(
            given,
            kind="already split" if is_split else "whole",
            batch_size=batch_size,
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
    return Feed(
        {"x": own.x, "y": own.y, "sample_weight": own.sample_weight},
        kind="arrays, dealt row by row",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        rank_rows=own.num_rows,
        steps_before=steps or -(-arrays.num_rows // (batch_size or _KERAS_BATCH_SIZE)),
        steps=after or -(-own.num_rows // (batch_size or _KERAS_BATCH_SIZE)),
        has_rows=split.rank < arrays.num_rows,
        facts={"the number of validation rows": arrays.num_rows},
    )


def _own_arrays_feed(
    given: dict[str, Any],
    arrays: Arrays,
    batch_size: int,
    steps_before: int | None,
    steps: int | None,
    split: Split,
) -> Feed:
    in_a_pass = -(-arrays.num_rows // batch_size)
    return Feed(
        given,
        kind="arrays, already split" if split.size > 1 else "arrays",
        batch_size=batch_size,
        num_rows=arrays.num_rows,
        steps_before=steps_before,
        steps=min(steps or in_a_pass, in_a_pass),
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
    x = given["x"]
    if split.size > 1 and split.shard == "auto" and is_ragged_or_sparse(given):
        raise ValueError(
            "Ragged and sparse tensors cannot be dealt to the ranks. Received: x of "
            f"type {type(x).__name__}. Pass dense arrays, or split the data yourself "
            'and pass shard="none" with a tf.data.Dataset.'
        )
    known = known_steps(x)
    if split.size > 1 and steps is None and known is None:
        raise ValueError(
            "The ranks cannot tell how many steps an epoch has, and one that ran out "
            f"of data alone would leave the others waiting. Received: x of type "
            f"{type(x).__name__} of unknown length, steps_per_epoch=None. "
            "Pass `steps_per_epoch`."
        )
    if known == 0:
        raise ValueError(
            "There is no data to train on. Received: "
            f"x of type {type(x).__name__} without a batch."
        )
    return Feed(
        given | {"batch_size": batch_size, "steps_per_epoch": steps},
        kind=f"{type(x).__name__.lstrip('_')}, taken as already split",
        batch_size=batch_size,
        steps_before=steps_before,
        steps=steps if known is None else min(steps or known, known),
        is_known=known is not None,
        facts={
            "the batches of a pass over its data": known,
            "the steps of an epoch": steps,
        },
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
