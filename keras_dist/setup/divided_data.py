"""Compare over the ranks what was divided before its rows were decoded."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_dist import comm
from keras_dist.data import Stream, length_before_repeat, seeds_of, sources_of

_ADVICE = (
    "`shard` takes from the same data another part on each rank: make it alike on all "
    "ranks, and pass `seed` to its `shuffle`."
)


@dataclass(frozen=True)
class DividedData:
    """What all ranks have of each data set that was divided; see `ShardSpec`."""

    lengths: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)


def facts(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """What has to be equal on all ranks before anything else is compared."""
    found: dict[str, Any] = {}
    for name, stream in streams.items():
        division = stream.division
        found[f"how `shard` divides the {name} data"] = (
            division.facts() if division else "as declared" * stream.is_declared
        )
    return found


def examined(streams: Mapping[str, Any]) -> DividedData:
    """Compare the data before it was divided. A collective if there is such data.

    The first elements are compared, and the seeds of shuffles. Nothing that comes after
    `shard` is read, unless it is validation data of which a rank may have no row.

    Args:
        streams: Data by name; all ranks know that they are divided alike.

    Raises:
        ValueError: On all ranks, if the data differs between the ranks, or was divided
            for other ranks.
    """
    found = DividedData()
    for name, stream in streams.items():
        if not isinstance(stream, Stream) or stream.division is None:
            continue
        _compare(name, stream)
        lengths = tuple(
            comm.gather_or_raise(functools.partial(_length_of, name, stream))
        )
        if lengths[0] == math.inf:
            _check_passes(name, stream)
        found.lengths[name] = lengths
        if name == "validation" and 0 in lengths:
            row = _row_of_another(stream, lengths)
            if lengths[comm.rank()] == 0:
                found.rows[name] = row
    return found


def _compare(name: str, stream: Stream) -> None:
    division = stream.division

    def seen() -> dict[str, Any]:
        if (division.rank, division.size) != (comm.rank(), comm.size()):
            raise ValueError(
                "The data was divided for other ranks than those that train. Received: "
                f"the data of rank {division.rank} of {division.size} on rank "
                f"{comm.rank()} of {comm.size()}. Pass the same `process_set` to "
                "`shard` as to this call."
            )
        is_by_rank = division.by != "source"  # else TensorFlow sees to the shuffles
        seeds = seeds_of(division.source) if is_by_rank else []
        first = stream.fingerprint_of_sources(sources_of(division))
        return {
            f"the seeds of shuffles before `shard` in the {name} data": seeds,
            f"the first elements before `shard` in the {name} data": first,
        }

    comm.agree(comm.run_on_all(seen), advice=_ADVICE)


def _length_of(name: str, stream: Stream) -> float | None:
    """Batches of this rank; 0 for validation data of which it has none."""
    is_unknown = name == "validation" and stream.length is None
    if is_unknown and stream.division.by != "source" and not stream.first(1):
        return 0
    return stream.length


def _check_passes(name: str, stream: Stream) -> None:
    lengths = comm.gather(length_before_repeat(stream.data))
    if len(set(lengths)) > 1:
        raise ValueError(
            f"The {name} data is repeated after it was divided, and the ranks' passes "
            f"have different lengths. Received: {lengths} elements in a pass of ranks "
            f"0 to {len(lengths) - 1}. Put `repeat` before `shard`."
        )


def _row_of_another(stream: Stream, lengths: tuple[float | None, ...]) -> Any:
    """A row of the first rank that has one: Keras cannot evaluate empty data."""
    root = next((rank for rank, length in enumerate(lengths) if length != 0), None)
    if root is None:
        raise ValueError(
            f"There is nothing to validate on. Received: a {stream.kind} without rows. "
            "Pass at least one row, or no `validation_data`."
        )

    def first_row() -> Any:
        if comm.rank() != root:
            return None
        return keras.tree.map_structure(
            lambda leaf: np.asarray(leaf)[:1], stream.first(1)[0]
        )

    return comm.broadcast(comm.run_on_all(first_row), root)
