"""One adapter a kind of data that comes in batches: what this rank reads of it.

To support a new kind: `Source` knows its length and how to iterate over it, and a
function here makes its `DataAdapter`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from keras_dist.data.dealer import (
    Dealer,
    add_mark,
    num_rows,
)
from keras_dist.data.division import Division, ShardSpec, check_shared_batch, no_data
from keras_dist.data.pipeline import (
    assert_length,
    begin_unread_pass,
    count_batches,
    disable_auto_shard,
    finite_or_none,
    first_steps,
    resume_in_first_epoch,
)
from keras_dist.data.sequence import ShardedSequence
from keras_dist.data.source import Source
from keras_dist.data.stream import StreamReader


@dataclass(frozen=True)
class DataAdapter:
    """What one rank reads of the user's data: the same answers for every kind.

    Args:
        data: The batches, in a type that Keras takes.
        length: Number of batches in a pass, `math.inf`, or `None` if unknown.
        division: Which rows or batches come at which step; `None` if the data cannot
            be read from the middle of an epoch.
        epoch: Has a method `assign(epoch)`, to be called before each epoch is read;
            `None` if the data is the same in every epoch.
        reader: What reads `data`, if its length is unknown.
        has_rows: `False` if this rank has no rows of its own and evaluates a copy of
            another rank's row, which its metrics must not count.
        is_marked: Whether each element is a batch and a mark (`dealer.add_mark`).
    """

    data: Any
    length: float | None
    division: Division | None = None
    epoch: Any = None
    reader: StreamReader | None = None
    has_rows: bool = True
    is_marked: bool = False


def is_dealt(source: Source, spec: ShardSpec) -> bool:
    """Return True if the batches are dealt to the ranks, and not each rank's own.

    A rank alone is dealt all of them if its position is saved.
    """
    return source.is_same or (spec.size == 1 and spec.keeps_position)


def adapt_batches(
    source: Source,
    spec: ShardSpec,
    *,
    is_training: bool,
    shuffle: bool = False,
    limit: int | None = None,
) -> DataAdapter:
    """Adapt data in batches: those that this rank is dealt, or all if they are its own.

    Args:
        source: The user's data.
        spec: The ranks, and how data is divided among them.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a `PyDataset` is read in another order each epoch.
        limit: Batches of all ranks in an evaluation, where they are dealt; `None` for
            all.

    Raises:
        ValueError: If there is no row to train on or to evaluate, or the numbers of
            presharded batches do not fit together.
    """
    if source.presharded is not None and spec.size > 1:
        return _adapt_presharded(source, spec, is_training)
    keeps_position = is_training and spec.keeps_position and source.has_known_order
    if spec.size == 1 and not keeps_position:
        return DataAdapter(source.data, source.length)
    if not is_dealt(source, spec):
        if source.length is None:
            return _adapt_stream(source, spec, Dealer(0, 1, is_training))
        length = finite_or_none(source.length)
        if source.kind == "dataset" and length is not None:
            return DataAdapter(assert_length(source.weigh(), length), length)
        return DataAdapter(source.data, source.length)
    splits = spec.is_global and is_training
    dealer = Dealer(spec.rank, spec.size, is_training, splits)
    has_rows = True
    if splits:
        _check_divisible(source, spec)
    elif not (has_rows := _check_batches(source, dealer, limit)):
        # As the first rank does: a pass of data that is also trained on changes what
        # comes in the next one.
        dealer = replace(dealer, rank=0)
    if source.kind == "sequence":
        adapter = _adapt_sequence(source, spec, dealer, shuffle, limit)
    elif source.kind == "dataset" and source.length is not None:
        adapter = _adapt_dataset(source, spec, dealer, keeps_position, limit)
    else:
        adapter = _adapt_stream(source, spec, dealer, limit)
    return replace(adapter, has_rows=has_rows)


def describe_sharding(source: Source, spec: ShardSpec, *, is_training: bool) -> str:
    """Name the type of the data and how it is sharded, for the plan."""
    kind, note = source.type_name, source.note
    if spec.size == 1:
        return kind
    if source.presharded is not None:
        return f"{kind}, sharded before decoding, by row"
    if not source.is_same:
        reason = ": the ranks' batches differ" if spec.shard != "none" else ""
        return f"{kind}, already split{reason}"
    if source.kind != "sequence" or (spec.is_global and is_training):
        note = f"; every rank makes all of them{note}"
    if spec.is_global and is_training:
        return f"{kind}, each batch sharded by row{note}"
    return f"{kind}, sharded by batch, round robin{note}"


def _check_batches(source: Source, dealer: Dealer, limit: int | None) -> bool:
    """Check that there is a batch; return whether this rank has one to evaluate."""
    if not source.is_short(dealer.size) and (limit or dealer.size) >= dealer.size:
        return True
    count = source.length
    if count is None:
        count = len(source.first(1 if dealer.is_training else dealer.size))
    if not count:
        received = f"a {source.type_name} without a batch"
        raise no_data(received, is_training=dealer.is_training)
    return dealer.is_training or min(count, limit or count) > dealer.rank


def _check_divisible(source: Source, spec: ShardSpec) -> None:
    """Check that a full batch has a row for each rank, where it can be known.

    Data whose order of each pass follows from seeds is not read for it.
    """
    rows = source.batch_size
    if rows is None and not source.has_seeded_passes:
        first = source.first(1)
        rows = num_rows(source.standardize(first[0])) if first else None
        # It may be the last one, and a small one.
        rows = None if source.length == 1 else rows
    if rows is not None:
        received = f"batches of {rows} rows in a {source.type_name}"
        check_shared_batch(rows, spec.size, received)


def _adapt_sequence(
    source: Source, spec: ShardSpec, dealer: Dealer, shuffle: bool, limit: int | None
) -> DataAdapter:
    own = ShardedSequence(
        source.data,
        dealer,
        limit=limit,
        class_weight=source.class_weight,
        seed=spec.seed if shuffle else None,
        gather=spec.gather if dealer.is_training else None,
        spec=spec if spec.keeps_position and dealer.is_training else None,
    )
    length = own.num_batches
    return DataAdapter(
        own,
        math.inf if length is None else length,
        epoch=own,
        division=own.division,
        is_marked=own.is_marked,
    )


def _adapt_stream(
    source: Source, spec: ShardSpec, dealer: Dealer, limit: int | None = None
) -> DataAdapter:
    reader = StreamReader(source, spec, dealer, limit=limit)
    return DataAdapter(
        reader.dataset(),
        None,
        reader=reader,
        is_marked=reader.is_marked,
    )


def _adapt_dataset(
    source: Source,
    spec: ShardSpec,
    dealer: Dealer,
    keeps_position: bool,
    limit: int | None,
) -> DataAdapter:
    data = source.weigh() if limit is None else first_steps(source.data, limit)
    length = finite_or_none(count_batches(data))
    is_resumed = length is not None and spec.position is not None
    is_marked = dealer.is_marked(length or 0, is_resumed=is_resumed)
    deal = functools.partial(dealer.deal, is_marked=is_marked)
    adapter = DataAdapter(None, math.inf, is_marked=is_marked)
    if length is not None:
        adapter = replace(adapter, length=dealer.num_steps(length))
    if length is None or not keeps_position:
        return replace(adapter, data=disable_auto_shard(deal(data)))
    division = Division.of(
        spec, length, per_step=dealer.per_step, unit="batches", seeds=source.seeds
    )
    return _resume(
        source,
        spec,
        adapter,
        division,
        deal(data),
        lambda: deal(data.skip(division.begin)),
    )


def _adapt_presharded(
    source: Source, spec: ShardSpec, is_training: bool
) -> DataAdapter:
    """Find this rank's batches, which are all that there are in its data set.

    At the end of a pass some ranks may have a batch more. In training the others take
    part in its step without rows, by a copy of their last one.
    """
    assert source.presharded is not None
    lengths, data = source.lengths, source.weigh()
    shown = ", ".join("unknown" if one is None else str(one) for one in lengths)
    received = (
        f"Received: {shown} batches of ranks 0 to {spec.size - 1} in a "
        f"{source.type_name}, divided by `shard`."
    )
    if is_training and 0 in lengths:
        raise ValueError(
            f"Each rank needs at least one row. {received} Pass more data, or start "
            "fewer processes."
        )
    if source.row is not None:
        row = tf.data.Dataset.from_tensors(source.row)
        return DataAdapter(row, 1, has_rows=False)
    if None in lengths:
        return _adapt_stream(source, spec, Dealer(0, 1, is_training))
    if math.inf in lengths:
        return DataAdapter(disable_auto_shard(data), math.inf)
    counts = [int(length or 0) for length in lengths]
    own, steps = counts[spec.rank], max(counts)
    if not is_training:
        return DataAdapter(disable_auto_shard(assert_length(data, own)), own)
    if steps > min(counts) + 1:
        raise ValueError(
            f"The ranks have different numbers of batches. {received} Leave rows out, "
            "and repeat them, before `shard`: put `filter`, `take`, `skip` and "
            "`repeat` above it."
        )
    is_marked = min(counts) < steps
    data = assert_length(data, own)
    if is_marked:
        data = _add_copy(data, own, steps)
    return DataAdapter(disable_auto_shard(data), steps, is_marked=is_marked)


def _resume(
    source: Source,
    spec: ShardSpec,
    adapter: DataAdapter,
    division: Division,
    whole: tf.data.Dataset,
    rest: Callable[[], tf.data.Dataset],
) -> DataAdapter:
    """Begin with the rest of a pass, if some of it was read before a checkpoint."""
    adapter = replace(adapter, division=division)
    if not division.begin:
        return replace(adapter, data=disable_auto_shard(whole))
    if source.has_seeded_passes:

        def as_made(batch: Any) -> Any:
            return add_mark(batch, has_rows=True) if adapter.is_marked else batch

        whole = begin_unread_pass(source.weigh(), as_made).concatenate(whole)
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = resume_in_first_epoch(rest(), whole, epoch=epoch, steps=division.steps)
    data = disable_auto_shard(dataset)
    return replace(adapter, data=data, epoch=epoch)


def _add_copy(dataset: tf.data.Dataset, count: int, steps: int) -> tf.data.Dataset:
    """Mark `count` batches; make `steps` by one more of the last, not to be counted."""

    @tf.autograph.experimental.do_not_convert
    def with_copy(number: tf.Tensor, batch: Any) -> tf.data.Dataset:
        copy = tf.data.Dataset.from_tensors(add_mark(batch, tf.constant(False)))
        is_last = tf.cast(tf.equal(number, count - 1), tf.int64)
        own = tf.data.Dataset.from_tensors(add_mark(batch, tf.constant(True)))
        return own.concatenate(copy.take(is_last * (steps - count)))

    return assert_length(dataset.enumerate().flat_map(with_copy), steps)
