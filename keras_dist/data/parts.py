"""One rank's part of data that comes in batches, of each kind of `Source`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from keras_dist.data.dealer import (
    Dealer,
    add_class_weights,
    deal_evaluations,
    marked,
    num_rows,
)
from keras_dist.data.division import Division, ShardSpec
from keras_dist.data.pipeline import (
    checked_length,
    finite_or_none,
    first_steps,
    length_of,
    rest_and_whole,
    unread_pass,
    without_auto_shard,
)
from keras_dist.data.presharded import Presharded, rest_of, rows_per_step
from keras_dist.data.sequence import ShardedSequence
from keras_dist.data.source import Source
from keras_dist.data.stream import StreamReader


@dataclass(frozen=True)
class Part:
    """The data of one rank, and its position in it.

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
        is_marked: Whether each element is a batch and a mark (`dealer.marked`).
        is_weighed: Whether the batches have the weights of their classes, if any.
        seeds: Where the position depends on them, the seeds of its shuffles.
    """

    data: Any
    length: float | None
    division: Division | None = None
    epoch: Any = None
    reader: StreamReader | None = None
    has_rows: bool = True
    is_marked: bool = False
    is_weighed: bool = False
    seeds: list[tuple[int, int]] | None = None


def is_dealt(source: Source, spec: ShardSpec) -> bool:
    """Tell whether the batches are dealt to the ranks, and not each rank's own.

    A rank alone is dealt all of them if its position is saved.
    """
    return source.agreed.is_same or (spec.size == 1 and spec.keeps_position)


def part_of(
    source: Source,
    spec: ShardSpec,
    *,
    is_training: bool,
    shuffle: bool = False,
    steps: int | None = None,
    class_weight: dict[int, float] | None = None,
) -> Part:
    """Find this rank's batches: those that it is dealt, or all if they are its own.

    Args:
        source: The user's data.
        spec: The ranks, and how data is divided among them.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a `PyDataset` is read in another order each epoch.
        steps: Batches of all ranks in an evaluation; `None` for all.
        class_weight: Weights of classes, which become weights of rows.

    Raises:
        ValueError: If there is no row to train on or to evaluate, or the numbers of
            presharded batches do not fit together.
    """
    if source.kind == "presharded" and spec.size > 1:
        return _of_presharded(source, spec, is_training, class_weight)
    keeps_position = is_training and spec.keeps_position and source.has_known_order()
    if spec.size == 1 and not keeps_position:
        return Part(source.data, source.length)
    if not is_dealt(source, spec):
        if source.length is None:
            dealer = Dealer(0, 1, is_training, class_weight=class_weight)
            return _of_stream(source, spec, dealer)
        return Part(_checked(source), source.length)
    splits = spec.is_global and is_training
    dealer = Dealer(spec.rank, spec.size, is_training, splits, class_weight)
    if splits:
        _check_divisible(source, spec)
    elif spec.is_global and steps is not None:
        return _of_evaluations(source, spec, steps)
    elif (few := _of_few(source, dealer)) is not None:
        return few
    if source.kind == "sequence":
        return _of_sequence(source, spec, dealer, shuffle)
    if source.kind == "dataset" and source.length is not None:
        return _of_dataset(source, spec, dealer, keeps_position)
    return _of_stream(source, spec, dealer)


def in_words(source: Source, spec: ShardSpec, *, is_training: bool) -> str:
    """Name the type of the data and how it is sharded, for the plan."""
    kind, note = source.type_name, source.agreed.note
    if spec.size == 1:
        return kind
    if source.presharded is not None:
        return f"{kind}, sharded before decoding, by row"
    if not source.agreed.is_same:
        reason = ": the ranks' batches differ" if spec.shard != "none" else ""
        return f"{kind}, already split{reason}"
    if source.is_declared and source.kind == "sequence":
        return f"{kind}, sharded before decoding, by batch"
    if source.kind != "sequence" or (spec.is_global and is_training):
        note = f"; every rank makes all of them{note}"
    if spec.is_global and is_training:
        return f"{kind}, each batch sharded by row{note}"
    return f"{kind}, sharded by batch, round robin{note}"


def _of_few(source: Source, dealer: Dealer) -> Part | None:
    """Check that there is a batch, or copy one for a rank without one to evaluate."""
    if not source.is_short(dealer.size):
        return None
    found = source.length
    if found is None:
        found = len(source.first(1 if dealer.is_training else dealer.size))
    if not found and dealer.is_training:
        raise ValueError(
            "There is no data to train on. Received: a "
            f"{source.type_name} without a batch. Pass at least one row."
        )
    if not found:
        raise ValueError(
            "There is nothing to validate on, or to predict. Received: a "
            f"{source.type_name} without rows. Pass at least one row, or no "
            "`validation_data`."
        )
    if dealer.is_training or found > dealer.rank:
        return None
    if source.kind == "dataset" and source.length:
        # Read in each evaluation, as by the other ranks: it may be the training data,
        # too, and one pass more would give it another order on this rank.
        one = without_auto_shard(first_steps(source.data, 1))
        return Part(one, 1, has_rows=False)
    row = source.as_read(source.first(1)[0])
    return Part(tf.data.Dataset.from_tensors(row), 1, has_rows=False)


def _check_divisible(source: Source, spec: ShardSpec) -> None:
    """Check that a full batch has a row for each rank, where it can be known.

    Data whose order of each pass follows from seeds is not read for it.
    """
    rows = source.batch_size
    if rows is None and not source.has_seeded_passes:
        first = source.first(1)
        rows = num_rows(source.as_read(first[0])) if first else None
        # It may be the last one, and a small one.
        rows = None if source.length == 1 else rows
    if rows is not None and rows < spec.size:
        raise ValueError(
            'With batch="global" all ranks share each batch, and a full batch needs a '
            f"row for each rank. Received: batches of {rows} rows in a "
            f"{source.type_name} for {spec.size} ranks. Make larger batches, or start "
            f"at most {rows} processes."
        )


def _of_evaluations(source: Source, spec: ShardSpec, steps: int) -> Part:
    """Deal the batches of evaluations of `steps` batches each, with marks."""
    data = source.data
    if source.kind != "dataset":
        data = StreamReader(source, spec, Dealer(0, 1, is_training=False)).dataset()
        if (length := finite_or_none(source.length)) is not None:
            data = checked_length(data, length)
    own = deal_evaluations(data, steps=steps, rank=spec.rank, size=spec.size)
    length_of_own = length_of(own)
    return Part(without_auto_shard(own), length_of_own, is_marked=True)


def _of_sequence(
    source: Source, spec: ShardSpec, dealer: Dealer, shuffle: bool
) -> Part:
    own = ShardedSequence(
        source.data,
        dealer,
        seed=spec.seed if shuffle else None,
        channel=spec.channel if dealer.is_training else None,
        position=spec.position if dealer.is_training else None,
        keeps_position=spec.keeps_position and dealer.is_training,
    )
    length = own.num_batches
    return Part(
        own,
        math.inf if length is None else length,
        epoch=own,
        division=own.division,
        is_marked=own.is_marked,
        is_weighed=True,
    )


def _of_stream(source: Source, spec: ShardSpec, dealer: Dealer) -> Part:
    reader = StreamReader(source, spec, dealer)
    return Part(
        reader.dataset(),
        None,
        reader=reader,
        is_marked=reader.is_marked,
        is_weighed=True,
    )


def _of_dataset(
    source: Source, spec: ShardSpec, dealer: Dealer, keeps_position: bool
) -> Part:
    data, length = source.data, finite_or_none(source.length)
    is_resumed = length is not None and spec.position is not None
    is_marked = dealer.is_marked(length or 0, is_resumed=is_resumed)
    deal = functools.partial(dealer.deal, is_marked=is_marked)
    part = Part(None, math.inf, is_marked=is_marked, is_weighed=True)
    if length is not None:
        part = replace(part, length=dealer.num_steps(length))
    if length is None or not keeps_position:
        return replace(part, data=without_auto_shard(deal(data)))
    division = Division.of(
        spec.position,
        length,
        per_step=dealer.per_step,
        size=dealer.size,
        unit="batches",
    )
    return _divided(
        source,
        spec,
        part,
        division,
        deal(data),
        lambda: deal(data.skip(division.begin)),
        dealer.class_weight,
    )


def _of_presharded(
    source: Source,
    spec: ShardSpec,
    is_training: bool,
    class_weight: dict[int, float] | None,
) -> Part:
    """Find this rank's batches, which are all that there are in its data set.

    At the end of a pass some ranks may have a batch more. In training the others take
    part in its step without rows, by a copy of their last one.
    """
    assert source.presharded is not None
    lengths, data = source.agreed.lengths, source.data
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
    if source.agreed.row is not None:
        row = tf.data.Dataset.from_tensors(source.agreed.row)
        return Part(row, 1, has_rows=False)
    if None in lengths:
        dealer = Dealer(0, 1, is_training, class_weight=class_weight)
        return _of_stream(source, spec, dealer)
    if is_training and class_weight:
        weigh = functools.partial(add_class_weights, class_weight=class_weight)
        data = data.map(tf.autograph.experimental.do_not_convert(lambda *b: weigh(b)))
    if math.inf in lengths:
        return Part(without_auto_shard(data), math.inf, is_weighed=True)
    counts = [int(length or 0) for length in lengths]
    own, steps = counts[spec.rank], max(counts)
    if not is_training:
        return Part(without_auto_shard(checked_length(data, own)), own)
    if steps > min(counts) + 1:
        raise ValueError(
            f"The ranks have different numbers of batches. {received} Leave rows out, "
            "and repeat them, before `shard`: put `filter`, `take`, `skip` and "
            "`repeat` above it."
        )
    division = None
    if spec.keeps_position and source.has_known_order():
        division = _division_of_presharded(source.presharded, data, counts, spec)
    is_resumed = division is not None and spec.position is not None
    is_marked = min(counts) < steps or is_resumed
    part = Part(None, steps, is_marked=is_marked, is_weighed=True)
    whole = checked_length(data, own)
    whole = _marked_to(whole, own, steps) if is_marked else whole
    if division is None:
        return replace(part, data=without_auto_shard(whole))

    def left() -> tf.data.Dataset:
        begin, per_step = division.begin, division.global_batch
        assert source.presharded is not None
        rest = rest_of(source.presharded, data, begin, per_step)
        if source.presharded.is_global:
            count = own - begin
        else:
            rows = source.presharded.rows_of(spec.rank, division.total)
            rows -= source.presharded.rows_of(spec.rank, begin)
            count = -(-rows // (per_step // spec.size))
        if count:
            return _marked_to(checked_length(rest, count), count, division.first_steps)
        # No batch is left to be copied.
        first = _marked_to(first_steps(checked_length(data, own), 1), 1, 1)
        return first.map(lambda batch, mark: (batch, 0 * mark))

    return _divided(source, spec, part, division, whole, left, class_weight)


def _division_of_presharded(
    presharded: Presharded, data: tf.data.Dataset, counts: list[int], spec: ShardSpec
) -> Division | None:
    """Divide the rows, or batches of all ranks; `None` if rows may be missing."""
    if presharded.is_global:
        # Each element is this rank's rows of a batch, for any number of ranks.
        total, per_step = max(counts), 1
    else:
        per_step = rows_per_step(presharded, data, counts) or 0
        total = int(presharded.length or 0)
    if not per_step:
        return None
    return Division.of(
        spec.position, total, per_step=per_step, size=spec.size, unit="batches"
    )


def _check_seeds(seeds: list[tuple[int, int]] | None, spec: ShardSpec) -> None:
    """Check that passes have the order that they had before a checkpoint."""
    if spec.position is None or not spec.position.done:
        return
    before = spec.seeds_before
    if before is not None:  # a checkpoint has lists
        before = [(int(first), int(second)) for first, second in before]
    if before != seeds:
        raise ValueError(
            "The training cannot go on in the middle of an epoch in another order of "
            f"the data: rows would come twice. Received: shuffles with the seeds "
            f"{seeds or 'none'}, and {before or 'none'} in the checkpoint. Set the "
            "same seeds as before (`shuffle(seed=…)`, keras.utils.set_random_seed), or "
            "pass an empty folder."
        )


def _divided(
    source: Source,
    spec: ShardSpec,
    part: Part,
    division: Division,
    whole: tf.data.Dataset,
    rest: Callable[[], tf.data.Dataset],
    class_weight: dict[int, float] | None,
) -> Part:
    """Complete a part that begins with the rest of a pass, if some of it was read."""
    seeds = source.seeds if source.has_seeded_passes else None
    _check_seeds(seeds, spec)
    part = replace(part, division=division, seeds=seeds)
    if not division.begin:
        return replace(part, data=without_auto_shard(whole))
    if seeds is not None:

        def as_made(batch: Any) -> Any:
            batch = add_class_weights(batch, class_weight)
            return marked(batch, has_rows=True) if part.is_marked else batch

        whole = unread_pass(source.data, as_made).concatenate(whole)
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = rest_and_whole(rest(), whole, epoch=epoch, steps=division.steps)
    data = without_auto_shard(dataset)
    return replace(part, data=data, epoch=epoch)


def _marked_to(dataset: tf.data.Dataset, count: int, steps: int) -> tf.data.Dataset:
    """Mark `count` batches, and repeat the last one, not to be counted, to `steps`."""

    @tf.autograph.experimental.do_not_convert
    def with_copies(number: tf.Tensor, batch: Any) -> tf.data.Dataset:
        copies = tf.data.Dataset.from_tensors(marked(batch, tf.constant(False)))
        is_last = tf.cast(tf.equal(number, count - 1), tf.int64)
        own = tf.data.Dataset.from_tensors(marked(batch, tf.constant(True)))
        return own.concatenate(copies.repeat(steps - count).take(is_last * steps))

    return checked_length(dataset.enumerate().flat_map(with_copies), steps)


def _checked(source: Source) -> Any:
    length = finite_or_none(source.length)
    if source.kind != "dataset" or length is None:
        return source.data
    return checked_length(source.data, length)
