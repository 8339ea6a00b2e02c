"""One rank's part of data that comes in batches, of each kind of `Source`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from keras_dist.data.division import Division, ShardSpec
from keras_dist.data.pipeline import (
    checked_length,
    finite_or_none,
    first_steps,
    length_of,
    lengths_of_spec,
    rest_and_whole,
    rows_per_batch,
    unread_pass,
    without_auto_shard,
)
from keras_dist.data.presharded import Rest
from keras_dist.data.round_robin import (
    Tail,
    have_one_length,
    in_turns,
    marked,
    num_rows,
    round_robin,
    rows_of_batches,
)
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
        total: Batches of all ranks in a pass over presharded data, if known.
        has_rows: `False` if this rank has no rows of its own and evaluates a copy of
            another rank's row, which its metrics must not count.
        is_marked: Whether each element is a batch and a mark (`round_robin.marked`).
        leftover: What happens to the batches that are left over at the end of a pass,
            in the words of the plan; "" if there are none.
        seeds: Where the position depends on them, the seeds of its shuffles.
    """

    data: Any
    length: float | None
    division: Division | None = None
    epoch: Any = None
    reader: StreamReader | None = None
    total: int | None = None
    has_rows: bool = True
    is_marked: bool = False
    leftover: str = ""
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
    epoch_steps: int | None = None,
    class_weight: dict[int, float] | None = None,
) -> Part:
    """Find this rank's batches: those that it is dealt, or all if they are its own.

    Args:
        source: The user's data.
        spec: The ranks, and how data is divided among them.
        is_training: Whether all ranks have to make the same number of steps.
        shuffle: Whether a `PyDataset` is read in another order each epoch.
        steps: Batches of all ranks in an evaluation; `None` for all.
        epoch_steps: Steps of an epoch of training; `None` for a pass.
        class_weight: Weights of classes, which become weights of rows where all ranks
            have rows of each batch.

    Raises:
        ValueError: If there are fewer rows to train on than ranks, no row to evaluate,
            or the numbers of presharded batches do not fit together.
    """
    if source.kind == "presharded" and spec.size > 1:
        return _of_presharded(source, spec, is_training, class_weight)
    keeps_position = is_training and spec.keeps_position and source.has_known_order()
    if spec.size == 1 and not keeps_position:
        return Part(source.data, source.length)
    if not is_dealt(source, spec):
        if source.length is None:
            return _of_stream(source, spec, None, is_training)
        return Part(_checked(source), source.length)
    rule = _rule_of(source, spec, is_training)
    # Elsewhere Keras itself weighs the batches.
    weights = class_weight if rule == "rows" else None
    tail = Tail(rule, spec.rank, spec.size, is_training, weights)
    if spec.is_global and is_training:
        _check_divisible(source, spec)
    elif spec.is_global and steps is not None:
        return _in_turns(source, spec, steps)
    elif (few := _of_few(source, tail)) is not None:
        return few
    if source.kind == "sequence":
        return _of_sequence(source, spec, tail, shuffle)
    if source.kind == "dataset" and source.length is not None:
        return _of_dataset(source, spec, tail, keeps_position, epoch_steps)
    return _of_stream(source, spec, tail, is_training)


def makes_all_batches(source: Source, spec: ShardSpec) -> bool:
    """Tell whether each rank makes the batches of all ranks, and leaves out most."""
    return spec.size > 1 and source.agreed.is_same and source.kind != "sequence"


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
    if makes_all_batches(source, spec) or (spec.is_global and is_training):
        note = f"; every rank makes all of them{note}"
    if spec.is_global and is_training:
        return f"{kind}, each batch sharded by row{note}"
    return f"{kind}, sharded by batch, round robin{note}"


def _rule_of(source: Source, spec: ShardSpec, is_training: bool) -> str:
    """Choose the rule of a `Tail`: what happens to the batches that are left over.

    A batch is cut where all its tensors have one length, and that length is open. It
    stays whole where

    - the length is a constant: a train step may rely on it (noise of shape
      `(batch_size, …)`);
    - the first axis may not count rows: tensors have different lengths, as in a batch
      that is one graph, or a sequence has a single array;
    - each rank has another batch left over: one might have rows for all ranks and
      another one too few, and the ranks would make different steps.

    With `batch="global"`, all ranks have rows of each training batch. In an evaluation
    each batch stays whole: its losses and metrics are those of one process.
    """
    if spec.is_global:
        return "rows" if is_training else "whole"
    if not is_training and _is_not_read_before(source, spec.size):
        return "whole"  # to cut them, their rows would have to be counted
    # In an evaluation, a rank without a batch makes no step, and needs no mark.
    can_mark = spec.can_mark or not is_training
    whole_or_cut = "whole" if can_mark else "cut"
    whole_or_drop = "whole" if can_mark else "drop"
    if source.agreed.is_unordered and spec.leftover != "drop":
        return whole_or_drop
    if spec.leftover != "auto":
        return spec.leftover
    is_dataset = source.kind == "dataset"
    if is_dataset:
        lengths = lengths_of_spec(source.data.element_spec)
        if any(length is not None for length in lengths):
            return whole_or_cut
        if len(lengths) < 2:
            return "cut"
        if source.has_seeded_passes:  # nothing of it was read
            return "either" if can_mark else "cut"
    if source.length and source.length % spec.size == 0 and spec.position is None:
        return "cut"  # none are left over
    shapes = source.shapes_of_first()
    if not have_one_length(shapes):
        return whole_or_drop
    # Of arrays without targets, nothing says that their first axis is one of rows.
    return whole_or_cut if len(shapes) == 1 and not is_dataset else "cut"


def _of_few(source: Source, tail: Tail) -> Part | None:
    """Check that there are rows for all ranks, or copy one for an evaluation.

    Rows are counted only if there may be fewer batches than ranks.
    """
    if not source.is_short(tail.size):
        return None
    if (
        source.length
        and not tail.is_training
        and _is_not_read_before(source, tail.size)
    ):
        if source.length > tail.rank:
            return None
        one = first_steps(source.data, 1)
        return Part(without_auto_shard(one), 1, has_rows=False)
    are_whole = tail.rule in ("whole", "drop")
    first = source.first(tail.size) if are_whole else []
    found = len(first) if are_whole else source.num_first_rows(tail.size)
    if tail.is_training and found < (1 if tail.rule == "whole" else tail.size):
        unit = "batches" if tail.rule == "drop" else "rows"
        raise ValueError(
            f"Each rank needs at least one row. Received: {found} {unit} in a "
            f"{source.type_name} for {tail.size} ranks. Pass more data, or start fewer "
            "processes."
        )
    if found == 0:
        raise ValueError(
            "There is nothing to validate on, or to predict. Received: a "
            f"{source.type_name} without rows. Pass at least one row, or no "
            "`validation_data`."
        )
    if found > tail.rank:
        return None
    row = source.as_read(source.first(1)[0])
    if not are_whole:
        row = rows_of_batches([row], rank=0, size=2**30)
    return Part(tf.data.Dataset.from_tensors(row), 1, has_rows=False)


def _is_not_read_before(source: Source, size: int) -> bool:
    """Tell whether a look at one of few batches would change the order of later passes.

    A rank that has no batch begins a pass in each evaluation, as the others do: it may
    be the training data, too, and one more pass would give this rank another order.
    """
    is_known = source.length is not None
    return is_known and source.has_seeded_passes and source.is_short(size)


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


def _in_turns(source: Source, spec: ShardSpec, steps: int) -> Part:
    """Deal the batches of evaluations of `steps` batches each, with marks."""
    data = source.data
    if source.kind != "dataset":
        data = StreamReader(source, spec, None, is_training=False).dataset()
        if (length := finite_or_none(source.length)) is not None:
            data = checked_length(data, length)
    own = in_turns(data, steps=steps, rank=spec.rank, size=spec.size)
    length_of_own = length_of(own)
    return Part(without_auto_shard(own), length_of_own, is_marked=True)


def _of_sequence(source: Source, spec: ShardSpec, tail: Tail, shuffle: bool) -> Part:
    data = source.data
    own = ShardedSequence(
        data,
        tail,
        seed=spec.seed if shuffle else None,
        channel=spec.channel if tail.is_training else None,
        position=spec.position,
        keeps_position=spec.keeps_position and tail.is_training,
    )
    length = own.num_batches
    return Part(
        own,
        math.inf if length is None else length,
        epoch=own,
        division=own.division,
        is_marked=own.is_marked,
        leftover=tail.in_words(int(data.num_batches or 0) % tail.per_step),
    )


def _of_dataset(
    source: Source,
    spec: ShardSpec,
    tail: Tail,
    keeps_position: bool,
    epoch_steps: int | None,
) -> Part:
    data, length = source.data, finite_or_none(source.length)
    in_tail = 0 if length is None else length % tail.per_step
    is_resumed = length is not None and spec.position is not None
    is_marked = tail.is_marked(in_tail, is_resumed=is_resumed)
    dealt = functools.partial(round_robin, tail=tail, is_marked=is_marked)
    dataset = dealt(data)
    if length is None:
        return Part(without_auto_shard(dataset), math.inf, is_marked=is_marked)

    def steps_after(read: int) -> int | None:
        return _steps_of(data, length - read, tail)

    steps = steps_after(0)
    part = Part(None, steps, is_marked=is_marked, leftover=tail.in_words(in_tail))
    mark = functools.partial(marked, has_rows=True)
    as_made = mark if is_marked else lambda batch: batch
    if steps is None:  # the last batch may be smaller
        # With `steps_per_epoch` Keras begins each pass that it reads, and no other.
        if source.has_seeded_passes and epoch_steps is None:
            dataset = dataset.concatenate(unread_pass(data, as_made))
        return replace(part, data=without_auto_shard(dataset))
    dataset = checked_length(dataset, steps)
    if not keeps_position:
        return replace(part, data=without_auto_shard(dataset))
    division = Division.of_batches(
        spec.position,
        length,
        size=tail.size,
        per_step=tail.per_step,
        steps_after=lambda read: steps_after(read) or 0,
    )
    begin = division.begin
    seeds = source.seeds if source.has_seeded_passes else None
    _check_seeds(seeds, spec)
    part = replace(part, seeds=seeds)
    if begin and seeds is not None:
        dataset = unread_pass(data, as_made).concatenate(dataset)
    return _divided(part, division, dataset, lambda: dealt(data.skip(begin)))


def _steps_of(data: tf.data.Dataset, count: int, tail: Tail) -> int | None:
    """Count the steps of so many batches; `None` if the last one's rows decide."""
    full, in_tail = divmod(count, tail.per_step)
    rows = rows_per_batch(data)
    has_tail = tail.has_step(in_tail, lambda: rows and in_tail * rows)
    return None if has_tail is None else full + has_tail


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


def _of_presharded(
    source: Source,
    spec: ShardSpec,
    is_training: bool,
    class_weight: dict[int, float] | None,
) -> Part:
    """Find this rank's batches, which are all that there are in its data set.

    Where fewer rows than ranks are left at the end of a pass, some ranks have a batch
    more. In training they leave it out, as every rank does that is sharded later; of
    batches that all ranks share, the others make the step with a copy, and batches with
    marks get the weights of their classes here.
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
        return _of_stream(source, spec, None, is_training)
    if math.inf in lengths:
        return Part(without_auto_shard(data), math.inf)
    counts = [int(length or 0) for length in lengths]
    own, steps = counts[spec.rank], min(counts)
    if not is_training:
        return Part(without_auto_shard(checked_length(data, own)), own)
    if max(counts) > steps + 1:
        raise ValueError(
            f"The ranks have different numbers of batches. {received} Leave rows out, "
            "and repeat them, before `shard`: put `filter`, `take`, `skip` and "
            "`repeat` above it."
        )
    is_global, is_marked = source.presharded.is_global, False
    if is_global:
        steps = max(counts)
        is_marked = min(counts) < steps
        if is_marked and class_weight:
            tail = Tail("rows", spec.rank, spec.size, is_training, class_weight)
            data = data.map(lambda *batch: tail.weighted(batch))
    whole = _marked_to(data, own, steps) if is_marked else _equal(data, own, steps)
    rest = Rest.of(source.presharded, data, counts)
    total = None if rest is None else rest.total
    part = Part(None, steps, total=total, is_marked=is_marked)
    if rest is None or not (spec.keeps_position and source.has_known_order()):
        return replace(part, data=without_auto_shard(whole))
    division = Division.of_batches(
        spec.position,
        rest.total,
        size=spec.size,
        steps_after=rest.steps_after,
        per_step=1 if is_global else None,
    )

    seeds = source.seeds if source.has_seeded_passes else None
    _check_seeds(seeds, spec)
    part = replace(part, seeds=seeds)
    if division.begin and seeds is not None:
        mark = functools.partial(marked, has_rows=True)
        unread = unread_pass(data, mark if is_marked else lambda batch: batch)
        whole = unread.concatenate(whole)

    def left() -> tf.data.Dataset:
        if is_global:
            rows, count = data.skip(division.begin), own - division.begin
            if is_marked and not count:  # no batch is left to be copied
                first = _marked_to(first_steps(checked_length(data, own), 1), 1, 1)
                return first.map(lambda batch, mark: (batch, 0 * mark))
            if is_marked:
                return _marked_to(rows, count, division.first_steps)
            return checked_length(rows, count)
        own_after = rest.batches_after(division.begin, spec.rank)
        rows = rest.after(division.begin, spec.rank)
        return _equal(rows, own_after, division.first_steps)

    return _divided(part, division, whole, left)


def _of_stream(
    source: Source,
    spec: ShardSpec,
    tail: Tail | None,
    is_training: bool,
) -> Part:
    reader = StreamReader(source, spec, tail, is_training=is_training)
    return Part(
        reader.dataset(),
        None,
        reader=reader,
        is_marked=reader.is_marked,
        leftover="" if tail is None else tail.in_words(None),
    )


def _divided(
    part: Part,
    division: Division,
    whole: tf.data.Dataset,
    rest: Callable[[], tf.data.Dataset],
) -> Part:
    """Complete a part that begins with the rest of a pass, if some of it was read."""
    if not division.begin:
        return replace(part, data=without_auto_shard(whole), division=division)
    epoch = tf.Variable(division.epoch, dtype=tf.int64, trainable=False)
    dataset = rest_and_whole(rest(), whole, epoch=epoch, steps=division.steps)
    data = without_auto_shard(dataset)
    return replace(part, data=data, division=division, epoch=epoch)


def _equal(dataset: tf.data.Dataset, count: int, needed: int) -> tf.data.Dataset:
    dataset = checked_length(dataset, count)
    return dataset if count == needed else first_steps(dataset, needed)


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
