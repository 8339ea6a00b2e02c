"""Feeds: the arguments for Keras that replace the user's data on one rank."""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.data.adapters import (
    DataAdapter,
    adapt_batches,
    describe_sharding,
    is_dealt,
)
from keras_dist.data.arrays import (
    UNEVEN,
    Arrays,
    RowOrder,
    draw_keras_order,
    is_arrays,
)
from keras_dist.data.dealer import Dealer, add_class_weights
from keras_dist.data.division import (
    Division,
    ShardSpec,
    check_shared_batch,
    no_data,
    scale_steps,
)
from keras_dist.data.pipeline import count_batches, finite_or_none, skip_epochs
from keras_dist.data.source import Source
from keras_dist.plan import Rows

# Keras's default.
_BATCH_SIZE = 32

# Stands in TensorFlow's error, and in ours, where a pass has another number of batches
# than the data set's cardinality says.
_WRONG_LENGTH = re.compile(r"expected to contain .* but contained[^\[{]*")


@dataclass(frozen=True)
class Feed:
    """The data of one rank, as arguments for Keras, and where it stands in it.

    Args:
        arguments: Keyword arguments for `Model.fit` or `Model.evaluate`.
        plan: The plan's lines about its rows and steps.
        adapter: What this rank reads.
        source: The user's data, to be kept until a pass over it was read; `None` if
            Keras reads it, and may refuse it.
        keras_steps: The steps of an evaluation for Keras; `None` where its data ends.
        is_exact: Whether the number of steps in the plan is certain, not an estimate.
        facts: Name and value of everything that has to be equal on all ranks.
        is_strided: Whether rank r of N has the rows r, r + N, … of each global batch;
            if not, the batches of the ranks follow one another in it.
    """

    arguments: dict[str, Any]
    plan: Rows
    adapter: DataAdapter
    source: Arrays | Source | None = None
    keras_steps: int | None = None
    is_exact: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    is_strided: bool = False

    @property
    def division(self) -> Division | None:
        """Division of the rows or batches over steps, if the feed has a position."""
        return self.adapter.division

    @property
    def has_epochs(self) -> bool:
        """Return True if `begin_epoch` must be called before each epoch is read."""
        return self.adapter.epoch is not None

    def begin_epoch(self, epoch: int) -> int:
        """Set the epoch that is read next; return its first step of this training."""
        if self.adapter.epoch is not None:
            self.adapter.epoch.assign(epoch)
        return 0 if self.division is None else self.division.find_first_step(epoch)


def training_feed(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    class_weight: dict[int, float] | None = None,
    batch_size: int | None,
    shuffle: bool | str,
    steps_per_epoch: int | None,
    steps_rule: str,
    spec: ShardSpec,
) -> Feed:
    """Make the arguments of `Model.fit` for this rank's training data.

    Args:
        x: Inputs: arrays, or data that comes in batches, perhaps as a `Source`.
        y: Targets, or `None`.
        sample_weight: Weights of the rows, or `None`.
        class_weight: Weights of the classes, as in `Model.fit`, or `None`.
        batch_size: Rows of one rank's batch, with `batch="global"` of all ranks
            together, or `None` for Keras's default.
        shuffle: As in `Model.fit`.
        steps_per_epoch: Steps of a script for one process, or `None` for all data.
        steps_rule: How `steps_per_epoch` changes with the number of ranks.
        spec: The ranks, and how data is divided among them.

    Raises:
        ValueError: If there is no data, there are fewer rows than ranks in it or in a
            global batch, or the data is infinite and `steps_per_epoch` is not given.
    """
    if x is None:
        raise ValueError(
            "There is no data to train on. Received: x=None. Pass arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator as `x`."
        )
    steps = scale_steps(steps_rule, steps_per_epoch, size=spec.size)
    given = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
    given |= {"batch_size": batch_size, "steps_per_epoch": steps, "shuffle": shuffle}
    rows = Rows(
        "arrays",
        batch_size=batch_size,
        is_global=spec.is_global,
        steps_before=steps_per_epoch,
        rule=f"steps scaled: {steps_rule}" if steps_per_epoch else "",
    )
    if is_arrays((x, y, sample_weight)):
        return _feed_arrays(
            Arrays.of(x, y, sample_weight), {"x": x} | given, rows, spec
        )
    return _feed_batches(x if isinstance(x, Source) else Source(x), given, rows, spec)


def _feed_arrays(
    arrays: Arrays, given: dict[str, Any], rows: Rows, spec: ShardSpec
) -> Feed:
    """Make the feed of training data in arrays."""
    steps, total = given["steps_per_epoch"], arrays.num_rows
    # Keras's default: all rows divided by the steps, or 32.
    per_step = -(-total // rows.steps_before) if rows.steps_before else None
    batch_size = _check_batch_size(rows.batch_size or per_step or _BATCH_SIZE)
    _check_rows(arrays, batch_size, spec)
    rows = replace(rows, batch_size=batch_size, total=total)
    facts: dict[str, Any] = {"the shapes of the rows": arrays.row_shapes()}
    if spec.shard == "none" or (spec.size == 1 and not spec.keeps_position):
        local_batch = spec.local_batch(batch_size)
        steps_per_pass = -(-total // local_batch)
        rows = replace(
            rows,
            kind="arrays, already split" if spec.size > 1 else "arrays",
            steps=min(steps or steps_per_pass, steps_per_pass),
        )
        facts["the batches of a pass over its rows"] = steps_per_pass
        facts["the steps of an epoch"] = steps
        arguments = given | {"batch_size": local_batch}
        adapter = DataAdapter(given["x"], rows.steps)
        return Feed(arguments, rows, adapter, arrays, facts=facts)
    division = Division.of(
        spec,
        total,
        per_step=batch_size * spec.batches_per_step,
        unit="rows",
        steps=steps,
    )
    class_weight = given["class_weight"]
    facts |= {
        "the number of rows": total,
        "the batch size": batch_size,
        "the steps of an epoch": division.steps,
        "`class_weight`": class_weight,
    }
    if class_weight:
        targets = np.asarray(arrays.y) if tf.is_tensor(arrays.y) else arrays.y
        pieces = (arrays.x, targets, arrays.sample_weight)
        arrays = Arrays(*add_class_weights(pieces, class_weight))
    shuffle, is_marked = given["shuffle"], division.has_empty_parts
    fixed = _find_keras_order(division, shuffle, spec.keras_seed)
    order = RowOrder(division, spec.rank, shuffle, spec.seed, is_marked, fixed)
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = order.dataset(arrays, epoch)
    return Feed(
        # They are part of the data set: Keras accepts none of them beside one.
        dict.fromkeys(given) | {"x": dataset, "shuffle": False},
        replace(
            rows,
            kind="arrays, sharded by row, " + ("shuffled" if shuffle else "in order"),
            is_by_row=True,
            steps_before=rows.steps_before or -(-total // batch_size),
            steps=division.steps,
        ),
        DataAdapter(dataset, division.steps, division, epoch, is_marked=is_marked),
        arrays,
        is_exact=not division.is_within_epoch,
        facts=facts,
        is_strided=True,
    )


def _feed_batches(
    source: Source, given: dict[str, Any], rows: Rows, spec: ShardSpec
) -> Feed:
    """Make the feed of training data that comes in batches."""
    steps, shuffle = given["steps_per_epoch"], bool(given["shuffle"])
    _check_trainable(source, given, spec)
    if source.has_seeded_passes and steps is None and spec.position:
        skip_epochs(source.data, spec.position.epoch)
    source.class_weight = given["class_weight"]
    adapter = adapt_batches(source, spec, is_training=True, shuffle=shuffle)
    is_plain = adapter.data is source.data
    is_sequence = isinstance(source.data, keras.utils.PyDataset)
    # A sequence that is not sharded is shuffled by Keras.
    is_shuffled = shuffle and is_plain and is_sequence
    arguments = given | {"x": adapter.data, "shuffle": is_shuffled}
    if not is_plain:
        arguments["class_weight"] = None  # the batches have it
    before, batch_size = finite_or_none(source.length), source.batch_size
    presharded = source.presharded
    is_shared = spec.is_global and (is_dealt(source, spec) or presharded is not None)
    if presharded is not None and spec.size > 1:
        length = finite_or_none(presharded.length)
        batch_size = presharded.batch_size or batch_size
        if batch_size and is_shared:
            batch_size *= spec.size
        before = -(-length // batch_size) if length and batch_size else None
    if steps is not None:
        # Keras may read ahead, into batches of the next epoch.
        adapter = replace(adapter, epoch=None, division=None)
    division = adapter.division
    is_known = adapter.length is not None or spec.size == 1
    return Feed(
        arguments,
        replace(
            rows,
            kind=describe_sharding(source, spec, is_training=True),
            batch_size=rows.batch_size or batch_size,
            is_global=is_shared,
            steps_before=rows.steps_before or before,
            steps=_take_smallest(steps, _count_steps(adapter, source, spec)),
        ),
        adapter,
        source,
        is_exact=is_known and not (division is not None and division.is_within_epoch),
        facts={
            "the batches of a pass over its data": finite_or_none(adapter.length),
            "the steps of an epoch": steps,
            "`class_weight`": given["class_weight"],
            "whether the data can be read from the middle": division is not None,
        },
        is_strided=presharded is not None or is_shared,
    )


def validation_feed(
    data: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    steps_rule: str,
    spec: ShardSpec,
) -> Feed:
    """Make the arguments of `Model.evaluate` for this rank's validation data.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)`, or data that comes in batches,
            perhaps as a `Source`.
        batch_size: Rows of one rank's batch, or `None` for Keras's default.
        steps: Steps of a script for one process, or `None` for all data.
        steps_rule: How `steps` changes with the number of ranks.
        spec: The ranks, and how data is divided among them.

    Raises:
        ValueError: If there is no row, or `steps` is unusable.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    own_steps = scale_steps(steps_rule, steps, size=spec.size)
    rule = f"steps scaled: {steps_rule}" if steps else ""
    pieces = {"x": x, "y": y, "sample_weight": sample_weight}
    rows = Rows("arrays", batch_size, steps_before=steps, rule=rule)
    if not is_arrays(tuple(pieces.values())) and x is not None:
        source = x if isinstance(x, Source) else Source(x)
        limit = own_steps if is_dealt(source, spec) and spec.size > 1 else None
        if limit is not None:
            limit *= spec.batches_per_step
            own_steps = -(-limit // spec.size)
        adapter = adapt_batches(source, spec, is_training=False, limit=limit)
        # With `steps`, a rank that has fewer rows left makes fewer of them.
        is_exact = adapter.length is not None and source.presharded is None
        rows = replace(
            rows,
            kind=describe_sharding(source, spec, is_training=False),
            steps_before=steps or finite_or_none(source.length),
            steps=_take_smallest(own_steps, _count_steps(adapter, source, spec)),
        )
        return Feed(
            pieces | {"x": adapter.data},
            rows,
            adapter,
            source,
            keras_steps=None if limit is not None else own_steps and rows.steps,
            is_exact=is_exact or spec.size == 1,
        )
    if spec.size == 1 or spec.shard == "none":
        rows = replace(
            rows,
            kind="arrays, already split" if spec.size > 1 else "arrays",
            total=keras.tree.flatten(x)[0].shape[0],
            steps=own_steps,
        )
        return Feed(pieces, rows, DataAdapter(x, own_steps), keras_steps=own_steps)
    arrays = Arrays.of(x, y, sample_weight)
    if arrays.num_rows == 0:
        raise no_data("arrays without rows")
    per_step = batch_size or _BATCH_SIZE
    adapter = _evaluate_arrays(arrays, per_step, own_steps, spec)
    rows = replace(
        rows,
        kind="arrays, sharded by " + ("batch" if spec.is_global else "row"),
        batch_size=per_step if spec.is_global else batch_size,
        is_global=spec.is_global,
        total=arrays.num_rows,
        is_by_row=not spec.is_global,
        steps_before=steps or -(-arrays.num_rows // per_step),
        steps=finite_or_none(adapter.length),
    )
    return Feed(
        dict.fromkeys(pieces) | {"x": adapter.data},
        rows,
        adapter,
        arrays,
        facts={"the number of validation rows": arrays.num_rows},
    )


def _evaluate_arrays(
    arrays: Arrays, batch_size: int, steps: int | None, spec: ShardSpec
) -> DataAdapter:
    """Shard rows; with `batch="global"` deal the batches of one process, undivided.

    `steps` are those of this rank, or with `batch="global"` of all together.
    """
    if spec.is_global:
        in_pass = -(-arrays.num_rows // batch_size)
        total = min(steps or in_pass, in_pass)
        has_rows = spec.rank < total
        dealer = Dealer(spec.rank if has_rows else 0, spec.size, is_training=False)
        data = arrays.in_batches(
            batch_size, lambda rows: dealer.deal(rows.take(total), is_marked=False)
        )
    else:
        has_rows = spec.rank < arrays.num_rows
        local = arrays.take_local_rows(rank=spec.rank, size=spec.size)
        data = local.in_batches(batch_size, lambda rows: rows.take(steps or -1))
    return DataAdapter(data, count_batches(data), has_rows=has_rows)


def hold_out(
    x: Any, y: Any, sample_weight: Any, validation_split: float
) -> list[tuple[Any, ...]]:
    """Split training and validation data, as `validation_split` of `Model.fit` does.

    They must be split before they are sharded: then no row is training data on one rank
    and validation data on another.

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
    arrays = Arrays.of(x, y, sample_weight)
    split_at = int(arrays.num_rows * (1.0 - validation_split))
    if not 0 < split_at < arrays.num_rows:
        raise ValueError(
            "Both parts of a validation split need at least one row. Received: "
            f"validation_split={validation_split} of {arrays.num_rows} rows. Pass more "
            "data, or another fraction."
        )
    parts = arrays[slice(0, split_at)], arrays[slice(split_at, None)]
    return [tuple(part.pieces().values()) for part in parts]


@contextlib.contextmanager
def raising_own_errors(feeds: Sequence[Feed]) -> Iterator[None]:
    """Context manager that raises the error that the user's data raised.

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
    """Return the error that the user's data raised, if TensorFlow has wrapped one."""
    if not isinstance(error, tf.errors.OpError):
        return error
    for feed in feeds:
        if feed.adapter.reader is not None and feed.adapter.reader.failure is not None:
            return feed.adapter.reader.failure
    if found := _WRONG_LENGTH.search(error.message):
        return RuntimeError(
            "A pass over the data gave another number of batches than the data set's "
            f"cardinality says. Received: a pass {found[0].strip().rstrip('.')}. A "
            "cache that was filled by an iterator that stopped midway has too few "
            "batches; so has a data set with a wrong `assert_cardinality`. Make the "
            "data set anew before this call."
        )
    return error


def _find_keras_order(
    division: Division, shuffle: bool | str, seed: int | None
) -> tf.Tensor | None:
    if not shuffle or seed is None:
        return None
    if shuffle != "batch":
        return draw_keras_order(seed, division.total, None)
    if division.begin % division.global_batch:
        return None  # resumed: the batches before had another size
    return draw_keras_order(seed, division.total, division.global_batch)


def _count_steps(adapter: DataAdapter, source: Source, spec: ShardSpec) -> int | None:
    """Count the steps of a pass; `None` if unknown or infinite.

    Where `adapter.length` is unknown it is an estimate, one too high at most: the last
    step is left out if its batches have too few rows.
    """
    length = finite_or_none(source.length)
    if adapter.length is not None or length is None:
        return finite_or_none(adapter.length)
    return math.ceil(length / (spec.size if is_dealt(source, spec) else 1))


def _take_smallest(*steps: int | None) -> int | None:
    return min(filter(None, steps), default=None)


def _check_trainable(source: Source, given: dict[str, Any], spec: ShardSpec) -> None:
    leaves = keras.tree.flatten([source.data, given["y"], given["sample_weight"]])
    is_uneven = any(isinstance(leaf, UNEVEN) for leaf in leaves)
    if spec.size > 1 and spec.shard != "none" and is_uneven:
        raise ValueError(
            "Ragged and sparse tensors cannot be sharded. Received: x of "
            f"type {source.type_name}. Pass dense arrays, or split the data yourself "
            'and pass shard="none" with a tf.data.Dataset.'
        )
    if source.length == 0:
        received = f"x of type {source.type_name} without a batch"
        raise no_data(received, is_training=True)
    is_endless = source.length == math.inf and given["steps_per_epoch"] is None
    if spec.size > 1 and is_endless:
        raise ValueError(
            "An epoch of infinite data needs a number of steps. Received: "
            f"infinite x of type {source.type_name}, steps_per_epoch=None. "
            "Pass `steps_per_epoch`."
        )


def _check_rows(arrays: Arrays, batch_size: int, spec: ShardSpec) -> None:
    if arrays.num_rows == 0:
        raise no_data("arrays of 0 rows", is_training=True)
    if spec.is_global:
        check_shared_batch(batch_size, spec.size, f"batch_size={batch_size}")
    is_sharded = spec.shard != "none" and not spec.is_global
    if is_sharded and arrays.num_rows < spec.size:
        raise ValueError(
            "Each rank needs at least one row. "
            f"Received: {arrays.num_rows} rows for {spec.size} ranks. "
            f"Pass more data, or start at most {arrays.num_rows} processes."
        )


def _check_batch_size(batch_size: Any) -> int:
    if not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ValueError(
            "`batch_size`, the rows of one rank's batch, must be a whole number of at "
            f"least 1. Received: batch_size={batch_size!r}"
        )
    return int(batch_size)
