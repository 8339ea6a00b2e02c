"""Find out whether all ranks have the same batches."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_dist import comm, optimizer
from keras_dist.data import (
    Channel,
    ShardSpec,
    Stream,
    divided_at_source,
    is_arrays,
    is_stream,
    stream_of,
)
from keras_dist.setup import divided_data
from keras_dist.setup.arguments import KerasArguments
from keras_dist.setup.options import Options

# In the plan, behind how the data is sharded.
_BY_INDEX = "; they differ from rank to rank: each rank takes its index"
_MAY_BE_SHUFFLED = (
    "If they are shuffled without a seed, rows are left out or come twice: pass "
    '`seed` to `shuffle`; or shard="none" if each rank has its own part'
)


def shard_spec_of(
    streams: dict[str, Any],
    options: Options,
    *,
    seed: int = 0,
    has_class_weight: bool = False,
) -> ShardSpec:
    """How the data is divided among the ranks. A collective: all ranks call it.

    Args:
        streams: Data by name; the batches of each `Stream` in it are compared.
        options: The options of `dist_fit`.
        seed: Seed of the order of the rows, the same on all ranks.
        has_class_weight: Whether Keras multiplies each batch by weights of classes.

    Raises:
        ValueError: On all ranks, if `shard` or `leftover` is unknown, the ranks have
            data of different kinds, or validation data shuffles differently on each.
    """
    channel, shard = _channel(options.process_set), options.shard
    # Keras would take a mark for the targets; without an exchange in each step, a copy
    # of a batch would be trained on.
    can_mark = not has_class_weight and optimizer.every_of(options.sync) == 1
    spec = comm.run_on_all(
        lambda: ShardSpec(
            comm.rank(),
            comm.size(),
            shard,
            seed,
            channel,
            leftover=options.leftover,
            can_mark=can_mark,
        )
    )
    same, notes, unordered = _compared(streams, shard)
    divided = divided_data.examined(streams)
    return replace(
        spec,
        same=same,
        notes=notes,
        unordered=unordered,
        lengths=divided.lengths,
        rows=divided.rows,
    )


def _channel(process_set: Sequence[int] | None) -> Channel:
    """Collectives for threads that read data, which do not inherit the process set."""

    def within(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            with comm.within(process_set):
                return function(value)

        return call

    return Channel(sum=within(comm.sum), gather=within(comm.gather))


def with_streams(given: KerasArguments, shard: str) -> KerasArguments:
    """The arguments, with a `Stream` in place of data that comes in batches."""
    validation = opened(given.validation_data, shard)
    return replace(given, x=opened(given.x, shard), validation_data=validation)


def opened(data: Any, shard: str) -> Any:
    """`data`, as a `Stream` if it comes in batches and there are several ranks."""
    if comm.size() == 1 or isinstance(data, Stream):
        return data
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    is_single = y is None and not is_arrays(x) and is_stream(x)
    if not is_single:
        return data
    stream = stream_of(x)
    if shard == "source" and isinstance(x, tf.data.Dataset) and not stream.division:
        own = divided_at_source(x, rank=comm.rank(), size=comm.size())
        return stream if own is None else stream_of(own)
    return stream


def _compared(
    streams: dict[str, Any], shard: str
) -> tuple[dict[str, bool], dict[str, str], list[str]]:
    """`same`, `notes`, `unordered` of a `ShardSpec`, from all ranks' first batches.

    If they differ, they are read a second time: if no rank's batches have changed, each
    rank has data of its own.
    """
    size = comm.size()
    known = {n: s for n, s in streams.items() if isinstance(s, Stream)}
    same: dict[str, bool] = {}
    notes: dict[str, str] = {}
    if size == 1:
        return same, notes, []
    kinds = {f"the kind of the {n} data": s.kind for n, s in known.items()}
    facts = {"`shard`": shard} | kinds | divided_data.facts(known)
    comm.agree(facts, advice="Give every rank the same kind of data.")
    same = {n: True for n, s in known.items() if s.is_declared}
    known = {n: s for n, s in known.items() if n not in same and s.division is None}
    if shard == "none" or not known:
        return same, notes, []
    own = comm.run_on_all(
        lambda: {n: (s.fingerprint(size), s.seeds) for n, s in known.items()}
    )
    everyone = comm.gather(own)
    for name, stream in known.items():
        fingerprints = {other[name][0] for other in everyone}
        if len(fingerprints) > 1:
            note = _note_on_random(name, stream, own[name][0])
            same[name] = note is not None
            notes[name] = note or ""
        elif all(other[name] == own[name] for other in everyone):
            same[name] = True
        else:  # the same rows, shuffled by other seeds
            same[name], notes[name] = True, _note_on_shuffles(name, stream)
    unordered = [name for name, note in notes.items() if _MAY_BE_SHUFFLED in note]
    return same, notes, unordered


def _note_on_random(name: str, stream: Stream, before: str) -> str | None:
    """What the plan says of random batches; `None` if each rank has its own data.

    A collective. Batches that are random are sharded by index: batch i of each rank is
    made of the same rows, if only what is made of them is random.
    """
    if not stream.is_repeatable:
        return None
    size = comm.size()
    now = comm.run_on_all(lambda: stream.fingerprint(size))
    if comm.sum(int(now != before)) == 0:
        return None
    if isinstance(stream.data, keras.utils.PyDataset):
        return _BY_INDEX
    readings = comm.run_on_all(lambda: [stream.fingerprints(size) for _ in range(2)])
    everyone = [one for both in comm.gather(readings) for one in both]
    if any(len(set(same)) == 1 and same[0] for same in zip(*everyone, strict=False)):
        return _BY_INDEX
    return _note_on_shuffles(name, stream)


def _note_on_shuffles(name: str, stream: Stream) -> str:
    """What the plan says of data that each rank reads in another order.

    The first rank warns, too.

    Raises:
        ValueError: If it is validation data, whose metrics would be of other rows.
    """
    if name == "training":
        if comm.rank() == 0:
            warnings.warn(
                "The ranks' training batches differ, and change when they are read "
                f"again. Received: x of type {stream.kind}. {_MAY_BE_SHUFFLED}.",
                stacklevel=2,
            )
        return f"{_BY_INDEX}. {_MAY_BE_SHUFFLED}"
    raise ValueError(
        f"The ranks' {name} batches differ, and change when they are read again, as if "
        f"data were shuffled without a seed. Received: x of type {stream.kind}. "
        "Pass `seed` to its `shuffle`, or call keras.utils.set_random_seed (with torch "
        "torch.manual_seed) with the same number on every rank before it is made; or "
        'pass shard="none" if each rank has its own part.'
    )
