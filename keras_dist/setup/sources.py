"""Compare the ranks' data: the same batches on all ranks, or each rank its own.

Or the first rank reads for all (`shard="first"`), and nothing is compared.
"""

import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import comm
from keras_dist.data import draws
from keras_dist.data.arrays import RAGGED_OR_SPARSE, is_arrays, lists_to_arrays
from keras_dist.data.division import ReadContext
from keras_dist.data.pipeline import cache_files, find_batch_size, list_seeds
from keras_dist.data.presharded import Presharded, find_presharded
from keras_dist.data.source import EQUAL_ROWS, Source, draw_other_numbers, is_source
from keras_dist.lines import warn
from keras_dist.setup.arguments import Options

# In the plan, behind how the data is sharded.
_DRAWS = "; what it draws does not change what the training draws"
_BY_INDEX = "; they differ from rank to rank: each rank takes its index"
_MAY_BE_SHUFFLED = (
    "If they are shuffled without a seed, rows are left out or come twice: pass "
    '`seed` to `shuffle`; or shard="none" if each rank has its own part'
)

# The arguments of `Model.fit` that are data.
PIECES = ("x", "y", "sample_weight", "validation_data")

_PRESHARDED_ADVICE = (
    "`shard` takes another part of the same data on each rank: make the data alike on "
    "all ranks, and pass `seed` to its `shuffle`."
)


def make_sources(arguments: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """Return the data of a fit: lists as arrays, what comes in batches as a `Source`.

    Args:
        arguments: Every argument of `Model.fit`.
        shard: The option of `dist_fit`.
    """
    pieces = {name: lists_to_arrays(arguments[name]) for name in PIECES}
    for name in ("x", "validation_data"):
        shuffle = name == "x" and bool(arguments["shuffle"])
        pieces[name] = make_source(pieces[name], shard, shuffle=shuffle)
    return pieces


def make_source(data: Any, shard: str, *, shuffle: bool = False) -> Any:
    """Make a `Source` of data that comes in batches, if there are several ranks."""
    if comm.size() == 1 or isinstance(data, Source) or is_arrays(data):
        return data  # a list of arrays has any number of inputs
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if y is not None or is_arrays(x) or not is_source(x):
        return data
    if shard == "first":
        # Nobody begins an iterator anew.
        is_pass = isinstance(x, Iterator)
        data = _receive(x) if is_pass else FirstRankBatches(x, shuffle=shuffle)
        return Source(data, is_sent=True)
    return Source(x)


class FirstRankBatches:
    """The first rank's batches, which all ranks get: each iterator is a pass.

    Args:
        data: Batches; on other ranks they are not read.
        shuffle: Whether a `PyDataset` is read in another order in each pass.
    """

    def __init__(self, data: Any, *, shuffle: bool) -> None:
        self._data, self._shuffle = data, shuffle

    def __iter__(self) -> Iterator[Any]:
        return _receive(_read_pass(self._data, self._shuffle))


def _read_pass(data: Any, shuffle: bool) -> Iterator[Any]:
    if not isinstance(data, keras.utils.PyDataset):
        yield from data
        return
    total = data.num_batches
    order: Any = itertools.count()
    if total is not None:
        order = list(range(total))
        if shuffle:
            random.shuffle(order)
    data.on_epoch_begin()
    for index in order:
        yield data[index]
    data.on_epoch_end()


def _receive(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of the first rank. Each of them is a collective."""
    while True:
        found: list[Any] = []
        if comm.rank() == 0:
            draws.draw_rank_numbers(0)  # the other ranks draw nothing for it
            try:
                found = list(map(_to_arrays, itertools.islice(batches, 1)))
            finally:
                draws.draw_common_numbers()
        found = comm.gather_in_thread(found)[0]
        if not found:
            return
        yield from found


def _to_arrays(batch: Any) -> Any:
    leaves = keras.tree.flatten(batch)
    if any(isinstance(leaf, RAGGED_OR_SPARSE) for leaf in leaves):
        raise ValueError(
            'With shard="first" batches of arrays are sent. Received: '
            f"{[type(leaf).__name__ for leaf in leaves]}"
        )
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf), batch
    )


def compare(
    data: Mapping[str, Any],
    options: Options,
    *,
    seed: int = 0,
    keras_seed: int | None = None,
) -> ReadContext:
    """Check whether all ranks have the same batches. A collective of all ranks.

    Args:
        data: Data by name; each `Source` in it learns what was found.
        options: The options of `dist_fit`.
        seed: Seed of the order of the rows, the same on all ranks.
        keras_seed: The seed with which Keras shuffles arrays; `None` if it draws one.

    Returns:
        How the data is divided among the ranks.

    Raises:
        ValueError: On all ranks, if the ranks have data of different kinds, validation
            data shuffles differently on each, or presharded data differs.
    """
    context = ReadContext(
        comm.rank(),
        comm.size(),
        options.shard,
        seed,
        comm.gather_in_thread,
        batch=options.batch,
        keras_seed=keras_seed,
    )
    if comm.size() == 1:
        return context
    sources = {n: x for n, x in data.items() if isinstance(x, Source)}
    facts: dict[str, Any] = {"`shard`": options.shard, "`batch`": options.batch}
    for name, source in sources.items():
        presharded = source.presharded
        facts[f"the kind of the {name} data"] = source.type_name
        facts[f"how `shard` divides the {name} data"] = (
            presharded and presharded.facts()
        )
    comm.agree(facts, advice="Give every rank the same kind of data.")
    for name, source in sources.items():
        source.is_read_by_all = context.is_global and name == "training"
        source.is_validation = name == "validation"
        if source.is_sent:
            # Each of them is a collective: so before any block of one rank.
            source.first(2 if name == "training" else max(2, comm.size()))
    _check_cache_files(sources, is_split=options.shard == "none")
    unknown = {
        name: source
        for name, source in sources.items()
        if not (source.is_replicated or source.presharded or options.shard == "none")
    }
    if unknown:
        _compare_batches(unknown)
    for name, source in sources.items():
        if source.presharded is not None:
            _compare_before_shard(name, source, source.presharded, options.batch)
    return context


def _check_cache_files(sources: Mapping[str, Source], *, is_split: bool) -> None:
    """Raise a `ValueError` if ranks of one host would cache in one file. A collective.

    A file that is complete may be read by all, unless each rank caches rows of its own.
    """
    own = [
        (os.uname().nodename, os.path.abspath(path), name)
        for name, source in sources.items()
        if isinstance(source.data, tf.data.Dataset)
        for path, cached in cache_files(source.data).items()
        if is_split or find_presharded(cached) or not os.path.exists(f"{path}.index")
    ]
    everyone = comm.gather(own)
    for found in dict.fromkeys(one for other in everyone for one in other):
        ranks = [rank for rank, other in enumerate(everyone) if found in other]
        if len(ranks) > 1:
            host, path, name = found
            raise ValueError(
                f"Ranks of one host would cache the {name} data in the same file. "
                f'Received: cache("{path}") on ranks {ranks} of host {host}. Give each '
                'rank a file of its own, as in cache(f"rows.{keras_dist.rank()}"), or '
                "fill it by one process before."
            )


def _compare_batches(sources: Mapping[str, Source]) -> None:
    """Compare the first batches of all ranks.

    If they differ, they are read a second time: if no rank's batches have changed, each
    rank has data of its own.
    """
    size = comm.size()
    own = {
        n: (s.fingerprint(size), s.seeds, draws.find_generators(s.data))
        for n, s in sources.items()
    }
    everyone = comm.gather(own)
    for name, source in sources.items():
        fingerprints = [other[name][0] for other in everyone]
        note: str | None = ""
        if any(other != fingerprints[0] for other in fingerprints):
            note = _note_on_random(name, source, fingerprints)
            components = enumerate(zip(*fingerprints, strict=False))
            source.random = {i for i, each in components if len(set(each)) > 1}
        elif any(other[name][1] != own[name][1] for other in everyone):
            note = _note_on_shuffles(name, source)  # the same rows, by other seeds
        states = [other[name][2] for other in everyone]
        names = [n for n in states[0] if len({each.get(n) for each in states}) > 1]
        if note is not None and names:
            note += _note_on_generators(name, source, names)
        source.is_replicated, source.note = note is not None, note or ""
        if source.is_validation and source.has_drawn:
            source.note += _DRAWS
        is_divided = source.is_replicated and not source.is_read_by_all
        if is_divided and source.kind == "sequence" and not states[0]:
            _warn_about_position(name, source, own[name][0])


def warn_about_own_data(data: Mapping[str, Any], shard: str) -> None:
    """Warn on the first rank of data that differs, in a script for one process.

    Args:
        data: Data by name, after `compare`.
        shard: The option of `distribute`.
    """
    for name, source in data.items():
        if not isinstance(source, Source) or comm.rank() > 0 or shard != "auto":
            continue
        if not (source.is_replicated or source.presharded):
            warn(
                f"Each rank has other {name} data, and reads all of it. Received: x of "
                f"type {source.type_name}. If it should be the same, set one seed on "
                "all ranks before it is made (keras.utils.set_random_seed); if you have"
                ' divided it, say so by shard="none".'
            )


def _warn_about_position(name: str, source: Source, before: list[str]) -> None:
    """Warn on the first rank if a sequence gives other batches when read again.

    Each rank reads a part of the batches, and such data depends on those before. A
    collective: all ranks read it, so that it stays the same on all.
    """
    source.drop_looks()
    again = source.fingerprint(comm.size())
    if comm.rank() == 0 and all(
        old != new for old, new in zip(before, again, strict=False)
    ):
        warn(
            f"The first batches of the {name} data are others when they are read again,"
            " so they depend on what was read before, and each rank reads a part. "
            f"Received: x of type {source.type_name}. Let `__getitem__` depend on its "
            'index alone, or pass shard="first".'
        )


def _note_on_random(
    name: str, source: Source, fingerprints: list[list[str]]
) -> str | None:
    """Say in the plan how batches are random; `None` if each rank has its own data.

    A collective. Batches that are random are sharded by index: batch i of each rank is
    made of the same rows, if only what is made of them is random. If some components
    are equal over the ranks, the same rows are changed at random.
    """
    if not source.is_repeatable:
        return None
    source.drop_looks()
    with draw_other_numbers():
        now = source.fingerprint(comm.size())
    again = comm.gather(now)
    if again == fingerprints:
        return None
    if source.kind == "sequence":
        return _BY_INDEX
    for same in zip(*fingerprints, *again, strict=False):
        if len(set(same)) == 1 and not same[0].startswith(EQUAL_ROWS):
            return _BY_INDEX
    return _note_on_shuffles(name, source)


def _note_on_generators(name: str, source: Source, names: list[str]) -> str:
    """Say in the plan that the data has generators of its own; the first rank warns."""
    shown = ", ".join(f"`{each}`" for each in names)
    if comm.rank() == 0:
        warn(
            f"The {name} data draws from a generator that differs from rank to rank: "
            "if it shuffles, rows of an epoch are left out or come twice. Received: x "
            f"of type {source.type_name} with {shown}. Give it a seed, or pass "
            'shard="first".'
        )
    return f"; {shown} differs from rank to rank: pass a seed"


def _note_on_shuffles(name: str, source: Source) -> str:
    """Say in the plan that each rank reads another order; the first rank warns, too.

    Raises:
        ValueError: If it is validation data, whose metrics would be of other rows.
    """
    if name == "training":
        if comm.rank() == 0:
            warn(
                "The ranks' training batches differ, and change when they are read "
                f"again. Received: x of type {source.type_name}. {_MAY_BE_SHUFFLED}."
            )
        return f"{_BY_INDEX}. {_MAY_BE_SHUFFLED}"
    raise ValueError(
        f"The ranks' {name} batches differ, and change when they are read again, as if "
        f"data were shuffled without a seed. Received: x of type {source.type_name}. "
        "Pass `seed` to its `shuffle`, or call keras.utils.set_random_seed (with torch "
        "torch.manual_seed) with the same number on every rank before it is made; or "
        'pass shard="none" if each rank has its own part.'
    )


def _compare_before_shard(
    name: str, source: Source, presharded: Presharded, batch: str
) -> None:
    """Compare data before it was divided. A collective.

    The first elements are compared, and the seeds of shuffles. Nothing that comes after
    `shard` is read, unless it is validation data of which a rank may have no row.
    """

    if name == "training":
        _check_shares(source, presharded, batch)
    seeds = list_seeds(presharded.source)
    first = source.fingerprint_inputs(presharded.source)
    facts = {
        f"the seeds of shuffles before `shard` in the {name} data": seeds,
        f"the first elements before `shard` in the {name} data": first,
    }
    comm.agree(facts, advice=_PRESHARDED_ADVICE)
    own_length = source.length
    if name == "validation" and own_length is None and not source.first(1):
        own_length = 0
    source.lengths = lengths = tuple(comm.gather(own_length))
    if lengths[0] == math.inf and presharded.length != math.inf:
        raise ValueError(
            f"The {name} data is repeated after it was divided, and the ranks' passes "
            "may have different lengths. Received: an endless "
            f"{source.type_name}. Put `repeat` before `shard`."
        )
    if 0 in lengths:
        raise ValueError(
            f"Each rank needs at least one row of {name} data. Received: "
            f"{list(lengths)} batches of ranks 0 to {len(lengths) - 1} in a "
            f"{source.type_name}, divided by `shard`. Pass more data, run on "
            "fewer ranks, or leave out `shard`."
        )


def _check_shares(source: Source, presharded: Presharded, batch: str) -> None:
    """Check that training data was divided for the same kind of batches as the fit."""
    if presharded.batch != batch:
        raise ValueError(
            f'The fit has batch="{batch}", and its data was divided by `shard` for '
            f'batches of batch="{presharded.batch}". Received: a {source.type_name}. '
            "Pass the same `batch` to both."
        )
    rows, local_rows = presharded.batch_size, find_batch_size(source.data)
    if batch == "global" and local_rows not in (None, rows):
        raise ValueError(
            "Each rank must batch its own rows of a batch of all ranks. Received: "
            f"batches of {local_rows} rows on rank {comm.rank()}, which has {rows} "
            "of each. Write `.batch(keras_dist.local_batch_size(…))` after `shard`."
        )
