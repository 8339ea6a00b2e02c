"""Make this rank's `Feed` of arrays, or of data that comes in batches.

To support a new kind: `Source` knows its length and how to iterate over it, and a
function here makes its `Feed`.
"""

import math
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist.data.arrays import Arrays, draw_keras_order, is_arrays, read_rows
from keras_dist.data.batch_rows import BatchRows, num_rows, put_beside
from keras_dist.data.dealer import Dealer
from keras_dist.data.division import (
    Division,
    ReadContext,
    divide_batch,
    limit_steps,
    no_data,
)
from keras_dist.data.feed import Feed
from keras_dist.data.pipeline import (
    assert_length,
    begin_unread_pass,
    count_batches,
    finite_or_none,
    first_steps,
    resume_in_first_epoch,
    skip_epochs,
)
from keras_dist.data.sequence import ShardedSequence, has_own_thread
from keras_dist.data.source import Source
from keras_dist.data.stream import StreamReader
from keras_dist.errors import check_count
from keras_dist.plan import Rows

# Keras's default.
_BATCH_SIZE = 32

# They are part of a data set of rows: Keras accepts none of them beside one.
_IN_DATASET = ("y", "sample_weight", "class_weight", "batch_size", "steps_per_epoch")


def training_feed(
    arguments: dict[str, Any], *, steps_rule: str, context: ReadContext
) -> Feed:
    """Make the feed of this rank's training data, from arguments of `Model.fit`.

    Args:
        arguments: Every argument of `Model.fit`; `x` may be a `Source`.
        steps_rule: How `steps_per_epoch` changes with the number of ranks.
        context: The ranks, and how data is divided among them.

    Raises:
        ValueError: If there is no data, there are fewer rows than ranks in it, or the
            data is infinite and `steps_per_epoch` is not given.
    """
    x = arguments["x"]
    if x is None:
        raise ValueError(
            "There is no data to train on. Received: x=None. Pass arrays, a "
            "tf.data.Dataset, a keras.utils.PyDataset or a generator as `x`."
        )
    name = "steps_per_epoch"
    before = limit_steps(arguments[name])
    arguments = arguments | {name: context.scale_steps(steps_rule, before, name=name)}
    rows = Rows(
        "arrays",
        batch_size=arguments["batch_size"],
        is_global=context.is_global,
        steps_before=before,
        rule=steps_rule if before else "",
    )
    pieces = x, arguments["y"], arguments["sample_weight"]
    if is_arrays(pieces):
        return _feed_arrays(Arrays(*pieces), arguments, rows, context)
    return _feed_batches(
        x if isinstance(x, Source) else Source(x), arguments, rows, context
    )


def _feed_arrays(
    arrays: Arrays, arguments: dict[str, Any], rows: Rows, context: ReadContext
) -> Feed:
    """Make the feed of training data in arrays."""
    steps, total = arguments["steps_per_epoch"], arrays.num_rows
    # Keras's default: all rows divided by the steps, or 32.
    is_own = context.shard == "none"
    all_rows = total
    if is_own and (context.is_global or steps != rows.steps_before):
        all_rows *= context.size  # `steps_before` is for the rows of all ranks
    per_step = -(-all_rows // rows.steps_before) if rows.steps_before else None
    batch_size = check_count("batch_size", rows.batch_size or per_step or _BATCH_SIZE)
    if total == 0:
        raise no_data("arrays of 0 rows", is_training=True)
    if total < context.size and not (is_own or context.is_global):
        raise ValueError(
            f"Each rank needs at least one row. Received: {total} rows for "
            f"{context.size} ranks. Pass more data, or run on fewer ranks (-np "
            f"{total})."
        )
    rows = replace(rows, batch_size=batch_size, total=total)
    facts: dict[str, Any] = {
        "the shapes of the rows": [shape[1:] for shape in arrays.shapes],
        "`class_weight`": arguments["class_weight"],
    }
    if is_own or (context.size == 1 and not context.keeps_position):
        local_batch = batch_size
        if context.is_global:
            local_batch = divide_batch(batch_size, context.size, 'shard="none"')
        steps_per_pass = -(-total // local_batch)
        rows = replace(
            rows,
            kind="arrays, already split" if context.size > 1 else "arrays",
            total=total if context.size == 1 else None,
            steps=min(steps or steps_per_pass, steps_per_pass),
        )
        facts["the batches of a pass over its rows"] = steps_per_pass
        facts["the steps of an epoch"] = steps
        return Feed(
            data=arguments["x"],
            plan=rows,
            arguments=arguments | {"batch_size": local_batch},
            source=arrays,
            facts=facts,
        )
    division = Division.of(
        context,
        total,
        per_step=batch_size * context.batches_per_step,
        unit="rows",
        steps=steps,
    )
    facts |= {
        "the number of rows": total,
        "the batch size": batch_size,
        "the steps of an epoch": division.steps,
    }
    shuffle, fixed = arguments["shuffle"], None
    inside = division.global_batch if shuffle == "batch" else None
    # Resumed in the middle of a batch: the batches before had another size.
    is_other = inside is not None and division.begin % inside > 0
    if shuffle and context.keras_seed is not None and not is_other:
        fixed = draw_keras_order(context.keras_seed, total, inside)
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = read_rows(
        arrays,
        division,
        epoch,
        rank=context.rank,
        shuffle=shuffle,
        seed=context.seed,
        fixed=fixed,
    )
    return Feed(
        data=dataset,
        plan=replace(
            rows,
            kind="arrays, sharded by row, " + ("shuffled" if shuffle else "in order"),
            is_by_row=True,
            steps_before=rows.steps_before or -(-total // batch_size),
            steps=division.steps,
        ),
        arguments=dict.fromkeys(_IN_DATASET) | {"x": dataset, "shuffle": False},
        source=arrays,
        division=division,
        epoch=epoch,
        is_exact=not division.is_within_epoch,
        class_weight=arguments["class_weight"],
        facts=facts,
    )


def _feed_batches(
    source: Source, arguments: dict[str, Any], rows: Rows, context: ReadContext
) -> Feed:
    """Make the feed of training data that comes in batches."""
    steps, shuffle = arguments["steps_per_epoch"], bool(arguments["shuffle"])
    _check_trainable(source, arguments, context)
    if source.has_seeded_passes and steps is None and context.position:
        skip_epochs(source.data, max(0, context.position.epoch - context.first_epoch))
    # With a number of steps an epoch is no pass, so Keras shuffles each pass. But with
    # several workers it draws in a thread of its own, while this one may draw, too.
    is_by_keras = steps is not None and not has_own_thread(source.data)
    feed = adapt_batches(
        source, context, is_training=True, shuffle=shuffle and not is_by_keras
    )
    if steps is not None:
        # Keras may read ahead, into batches of the next epoch.
        feed = replace(feed, epoch=None, division=None)
    # One process reads the user's data as it is, unless its epochs are set.
    is_plain = feed.data is source.data or (context.size == 1 and feed.epoch is None)
    is_shuffled = shuffle and (is_plain or is_by_keras) and source.kind == "sequence"
    local = arguments | {"x": feed.data, "shuffle": is_shuffled}
    if not is_plain:
        local["class_weight"] = None  # the step adds it
    before, batch_size = finite_or_none(source.length), source.batch_size
    presharded = source.presharded
    is_shared = context.is_global and (
        is_dealt(source, context) or presharded is not None
    )
    if presharded is not None and context.size > 1:
        length = finite_or_none(presharded.length)
        batch_size = presharded.batch_size or batch_size
        if batch_size and is_shared:
            batch_size *= context.size
        before = -(-length // batch_size) if length and batch_size else None
    division = feed.division
    return replace(
        feed,
        arguments=local,
        plan=replace(
            rows,
            kind=describe_sharding(source, context, is_training=True),
            batch_size=rows.batch_size or batch_size,
            is_global=is_shared,
            steps_before=rows.steps_before or before,
            steps=_count_steps(feed, source, context, steps),
        ),
        source=source,
        class_weight=None if is_plain else arguments["class_weight"],
        is_exact=feed.reader is None and not (division and division.is_within_epoch),
        facts={
            "the batches of a pass over its data": _count_dealt(source, context)
            or finite_or_none(feed.length),
            "the steps of an epoch": steps,
            "`class_weight`": arguments["class_weight"],
            "whether the data can be read from the middle": division is not None,
        },
    )


def validation_feed(
    data: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    steps_rule: str,
    context: ReadContext,
    prefix: str = "",
) -> Feed:
    """Make the feed of this rank's validation data.

    Args:
        data: The user's `validation_data`, perhaps a `Source`.
        batch_size, steps: The user's.
        steps_rule: How `steps` changes with the number of ranks.
        context: The ranks, and how data is divided among them.
        prefix: Of the names that the user gave `batch_size` and `steps`.

    Raises:
        ValueError: If there is no row, or `steps` is unusable.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    name, steps = f"{prefix}steps", limit_steps(steps)
    own_steps = context.scale_steps(steps_rule, steps, name=name)
    if batch_size is not None:
        batch_size = check_count(f"{prefix}batch_size", batch_size)
    pieces = {"x": x, "y": y, "sample_weight": sample_weight}
    rows = Rows(
        "arrays", batch_size, steps_before=steps, rule=steps_rule if steps else ""
    )
    if not is_arrays(tuple(pieces.values())) and x is not None:
        _check_dense(list(pieces.values()), context)
        source = x if isinstance(x, Source) else Source(x)
        limit = own_steps if is_dealt(source, context) and context.size > 1 else None
        if limit is not None:
            limit *= context.batches_per_step
            own_steps = -(-limit // context.size)
        feed = adapt_batches(source, context, is_training=False, limit=limit)
        # With `steps`, a rank that has fewer rows left makes fewer of them.
        is_exact = feed.reader is None and source.presharded is None
        rows = replace(
            rows,
            kind=describe_sharding(source, context, is_training=False),
            steps_before=steps or finite_or_none(source.length),
            steps=_count_steps(feed, source, context, own_steps),
        )
        return replace(
            feed,
            arguments=pieces | {"x": feed.data},
            plan=rows,
            source=source,
            keras_steps=None if limit is not None else own_steps and rows.steps,
            is_exact=is_exact,
            facts={"the validation batches of a pass": _count_dealt(source, context)},
        )
    if context.size == 1 or context.shard == "none":
        rows = replace(
            rows,
            kind="arrays, already split" if context.size > 1 else "arrays",
            total=keras.tree.flatten(x)[0].shape[0] if context.size == 1 else None,
            steps=own_steps,
        )
        return Feed(data=x, plan=rows, arguments=pieces, keras_steps=own_steps)
    arrays = Arrays(x, y, sample_weight)
    if arrays.num_rows == 0:
        raise no_data("arrays without rows")
    # As in Keras.
    per_step = -(-arrays.num_rows // steps) if steps else _BATCH_SIZE
    batch_size = batch_size or per_step
    in_pass = -(-arrays.num_rows // batch_size)
    total = min(in_pass, (own_steps or in_pass) * context.batches_per_step)
    dealer = Dealer(context.rank, context.size, is_training=False)
    if context.rank >= total:
        dealer = replace(dealer, rank=0, is_copy=True)
    is_even = arrays.num_rows % batch_size == 0  # the shape then has the rows
    indices = tf.data.Dataset.range(arrays.num_rows)
    indices = indices.batch(batch_size, drop_remainder=is_even).take(total)
    data = arrays.read(dealer.deal(indices)).prefetch(tf.data.AUTOTUNE)
    return Feed(
        data=data,
        plan=replace(
            rows,
            kind="arrays, sharded by batch",
            batch_size=batch_size,
            total=arrays.num_rows,
            is_global=context.is_global,
            steps_before=steps or in_pass,
            steps=dealer.num_steps(total),
        ),
        arguments=dict.fromkeys(pieces) | {"x": data},
        source=arrays,
        facts={"the number of validation rows": arrays.num_rows},
    )


def hold_out(
    arguments: dict[str, Any], context: ReadContext
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Split training and validation data, as `validation_split` of `Model.fit` does.

    They must be split before they are sharded: then no row is training data on one rank
    and validation data on another.

    Args:
        arguments: Every argument of `Model.fit`.
        context: The ranks, and how data is divided among them.

    Returns:
        The same with the rows to train on; and `(x, y, sample_weight)` for validation.

    Raises:
        ValueError: If the data is not arrays, or one of the two parts would be empty.
    """
    names = ("x", "y", "sample_weight")
    data, validation_split = (
        [arguments[n] for n in names],
        arguments["validation_split"],
    )
    _check_dense(data, context)
    if not is_arrays(data):
        raise ValueError(
            "`validation_split` needs arrays. "
            f"Received: x of type {type(data[0]).__name__}. Pass `validation_data` "
            "instead."
        )
    arrays = Arrays(*data)
    split_at = int(arrays.num_rows * (1.0 - validation_split))
    if not 0 < split_at < arrays.num_rows:
        raise ValueError(
            "Both parts of a validation split need at least one row. Received: "
            f"validation_split={validation_split} of {arrays.num_rows} rows. Pass more "
            "data, or another fraction."
        )
    pieces = arrays.x, arrays.y, arrays.sample_weight

    def take(rows: slice) -> Any:  # NumPy arrays become views, and are not copied
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], pieces
        )

    kept = dict(zip(names, take(slice(0, split_at)), strict=True))
    return arguments | kept, take(slice(split_at, None))


def is_dealt(source: Source, context: ReadContext) -> bool:
    """Return True if the batches are dealt to the ranks, and not each rank's own.

    A rank alone is dealt all of them if its position is saved.
    """
    return source.is_replicated or (context.size == 1 and context.keeps_position)


def _count_dealt(source: Source, context: ReadContext) -> int | None:
    """Count the batches of a pass that is dealt; more on one rank would be left out."""
    is_own = source.presharded is not None or not is_dealt(source, context)
    return None if is_own else finite_or_none(source.length)


def adapt_batches(
    source: Source,
    context: ReadContext,
    *,
    is_training: bool,
    shuffle: bool = False,
    limit: int | None = None,
) -> Feed:
    """Adapt data in batches: those that this rank is dealt, or all if they are its own.

    Args:
        source: The user's data.
        context: The ranks, and how data is divided among them.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a `PyDataset` is read in another order each epoch.
        limit: Batches of all ranks in an evaluation, where they are dealt; `None` for
            all.

    Raises:
        ValueError: If there is no row to train on or to evaluate, or the numbers of
            presharded batches do not fit together.
    """
    if source.presharded is not None and context.size > 1:
        return _adapt_presharded(source, context, is_training)
    keeps_position = is_training and context.keeps_position and source.has_known_order
    if context.size == 1 and not keeps_position:
        return Feed(data=source.data, length=source.length)
    if not is_dealt(source, context):
        if source.length is None:
            return _adapt_stream(source, context, Dealer(0, 1, is_training))
        length = finite_or_none(source.length)
        if source.kind == "dataset" and length is not None:
            return Feed(data=assert_length(source.data, length), length=length)
        return Feed(data=source.data, length=source.length)
    splits = context.is_global and is_training
    dealer = Dealer(context.rank, context.size, is_training, splits)
    if not splits and not _check_batches(source, dealer, limit):
        # As the first rank does: a pass of data that is also trained on changes what
        # comes in the next one.
        dealer = replace(dealer, rank=0, is_copy=True)
    if source.kind == "sequence":
        own = ShardedSequence(source, dealer, context, limit=limit, shuffle=shuffle)
        count = own.num_batches
        return Feed(
            data=own,
            length=math.inf if count is None else count,
            epoch=own,
            division=own.division,
        )
    if source.kind == "dataset" and source.length is not None:
        return _adapt_dataset(source, context, dealer, keeps_position, limit)
    return _adapt_stream(source, context, dealer, limit)


def describe_sharding(
    source: Source, context: ReadContext, *, is_training: bool
) -> str:
    """Name the type of the data and how it is sharded, for the plan."""
    kind, note = source.type_name, source.note
    if context.size == 1:
        return kind
    if source.presharded is not None:
        return f"{kind}, sharded before decoding, by row"
    if not source.is_replicated:
        reason = ": the ranks' batches differ" if context.shard != "none" else ""
        return f"{kind}, already split{reason}"
    if source.kind != "sequence" or (context.is_global and is_training):
        note = f"; every rank makes all of them{note}"
    if context.is_global and is_training:
        return f"{kind}, each batch sharded by row{note}"
    return f"{kind}, sharded by batch, round robin{note}"


def _check_batches(source: Source, dealer: Dealer, limit: int | None) -> bool:
    """Check that there is a batch; return whether this rank has one to evaluate."""
    if not source.is_short(dealer.size) and (limit or dealer.size) >= dealer.size:
        return True
    count = source.length
    if count is None and dealer.is_training and source.has_seeded_passes:
        return True  # a look would begin a pass before the first epoch
    if count is None:
        count = len(source.first(1 if dealer.is_training else dealer.size))
    if not count:
        received = f"a {source.type_name} without a batch"
        raise no_data(received, is_training=dealer.is_training)
    return dealer.is_training or min(count, limit or count) > dealer.rank


def _adapt_stream(
    source: Source, context: ReadContext, dealer: Dealer, limit: int | None = None
) -> Feed:
    reader = StreamReader(source, context, dealer, limit=limit)
    return Feed(data=reader.dataset(), reader=reader)


def _adapt_dataset(
    source: Source,
    context: ReadContext,
    dealer: Dealer,
    keeps_position: bool,
    limit: int | None,
) -> Feed:
    data = source.data if limit is None else first_steps(source.data, limit)
    length = finite_or_none(count_batches(data))
    whole = dealer.deal(data)
    steps = math.inf if length is None else dealer.num_steps(length)
    feed = Feed(data=whole.prefetch(tf.data.AUTOTUNE), length=steps)
    if length is None or not keeps_position:
        return feed
    division = Division.of(
        context, length, per_step=dealer.per_step, unit="batches", seeds=source.seeds
    )
    feed = replace(feed, division=division)
    if not division.begin:
        return feed
    if source.has_seeded_passes:
        whole = begin_unread_pass(data, dealer.put_numbers).concatenate(whole)
    rest = dealer.deal(data.skip(division.begin))
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = resume_in_first_epoch(rest, whole, epoch=epoch, steps=division.steps)
    return replace(feed, data=dataset.prefetch(tf.data.AUTOTUNE), epoch=epoch)


def _adapt_presharded(source: Source, context: ReadContext, is_training: bool) -> Feed:
    """Make the feed of presharded data: a rank reads all batches of its data set.

    At the end of a pass some ranks may have a batch more. In training the others take
    part in its step without rows, by a copy of their last one.
    """
    assert source.presharded is not None
    lengths, data = source.lengths, source.data
    if None in lengths:
        return _adapt_stream(source, context, Dealer(0, 1, is_training))
    if math.inf in lengths:
        return Feed(data=data.prefetch(tf.data.AUTOTUNE), length=math.inf)
    counts = [int(length or 0) for length in lengths]
    own = counts[context.rank]
    steps = max(counts) if is_training else own
    if is_training and steps > min(counts) + 1:
        raise ValueError(
            "The ranks have different numbers of batches. Received: "
            f"{counts} batches of ranks 0 to {context.size - 1} in a {source.type_name}"
            ", divided by `shard`. Leave rows out, and repeat them, before `shard`: "
            "put `filter`, `take`, `skip` and `repeat` above it."
        )
    data = assert_length(data, own)
    if is_training and min(counts) < steps:
        data = _add_copy(data, own, steps)
    return Feed(data=data.prefetch(tf.data.AUTOTUNE), length=steps)


def _add_copy(dataset: tf.data.Dataset, count: int, steps: int) -> tf.data.Dataset:
    """Make `steps` of `count` batches, by a copy of the last, not to be counted."""

    @tf.autograph.experimental.do_not_convert
    def with_copy(number: tf.Tensor, batch: Any) -> tf.data.Dataset:
        copy = tf.data.Dataset.from_tensors(put_beside(batch, BatchRows(0)))
        is_last = tf.cast(tf.equal(number, count - 1), tf.int64)
        rows = BatchRows(num_rows(batch))
        own = tf.data.Dataset.from_tensors(put_beside(batch, rows))
        return own.concatenate(copy.take(is_last * (steps - count)))

    return assert_length(dataset.enumerate().flat_map(with_copy), steps)


def _count_steps(
    feed: Feed, source: Source, context: ReadContext, most: int | None
) -> int | None:
    """Count the steps of a pass, up to `most`; `None` if unknown or infinite.

    Where `feed.length` is unknown it is an estimate, one too high at most: the last
    step is left out if its batches have too few rows.
    """
    length = finite_or_none(source.length)
    steps = finite_or_none(feed.length)
    if feed.length is None and length is not None:
        steps = math.ceil(length / (context.size if is_dealt(source, context) else 1))
    return min(filter(None, (steps, most)), default=None)


def _check_trainable(
    source: Source, arguments: dict[str, Any], context: ReadContext
) -> None:
    _check_dense([source.data, arguments["y"], arguments["sample_weight"]], context)
    if source.length == 0:
        received = f"x of type {source.type_name} without a batch"
        raise no_data(received, is_training=True)
    is_endless = source.length == math.inf and arguments["steps_per_epoch"] is None
    if context.size > 1 and is_endless:
        raise ValueError(
            "An epoch of infinite data needs a number of steps. Received: "
            f"infinite x of type {source.type_name}, steps_per_epoch=None. "
            "Pass `steps_per_epoch`."
        )


def _check_dense(pieces: list[Any], context: ReadContext) -> None:
    """Raise an error if x, targets or weights are sparse tensors."""
    leaves = keras.tree.flatten(pieces)
    is_sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in leaves)
    if context.size > 1 and context.shard != "none" and is_sparse:
        raise ValueError(
            "Sparse tensors cannot be sharded. Received: x of type "
            f"{type(pieces[0]).__name__}. Pass sparse matrices of SciPy, dense arrays, "
            "or a tf.data.Dataset of their batches."
        )
