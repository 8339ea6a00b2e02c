"""Measures cases and ways of keras.io on all ranks; the first rank writes a file.

Usage: python table.py FILE [PATTERN]   all, or those whose title matches
"""

import functools
import json
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from cases import CASES, Case
from claims import assert_equal_to_the_bit, distribute_jobs
from keras_ways import WAYS
from keras_ways.way import Way, difference, digest, train_plainly

import keras_dist

# Oracles that are computed at a time, each one on one rank.
CHUNK = 12


@dataclass(frozen=True)
class Row:
    """One training, on one process and on all ranks.

    Args:
        part: The topic.
        name: In words.
        tolerance: The usual one.
        train: Trains on one process.
        compare: Trains on all ranks; returns the difference, and the tolerance.
        is_global: Whether the ranks share the batches, by `batch="global"`.
        is_way: Whether it is one of `keras_ways`.
    """

    part: str
    name: str
    tolerance: float
    train: Callable[[], Any]
    compare: Callable[[Any], tuple[float, float]]
    is_global: bool
    is_way: bool = False


def make_row(case: Case) -> Row:
    """Return the row of a case."""
    size = keras_dist.size()

    def compare(expected):
        found, tolerance, model = case.measure(size, expected)
        assert_equal_to_the_bit(model)
        return found, tolerance

    given = case.part, case.name, case.tolerance
    return Row(*given, lambda: case.state_of_one_process(size), compare, case.is_global)


def make_row_of_way(way: Way, is_global: bool, folder: Path) -> Row:
    """Return the row of a way, in float64, in which rounding hides nothing."""
    size, own = keras_dist.size(), folder / f"{WAYS.index(way)} {is_global}"
    tolerance = way.tolerance("float64")

    def compare(expected):
        run = way.run_of(size, folder, is_oracle=False, is_global=is_global)
        ours = way.arrays(run, "float64")
        assert len(set(keras_dist.gather(digest(ours)))) == 1
        return difference(ours, expected)[0], tolerance

    return Row(
        *(way.part, way.name, tolerance),
        functools.partial(train_plainly, way, "float64", is_global, size, own),
        compare,
        is_global,
        is_way=True,
    )


def measure(rows: list[Row]) -> list[dict[str, Any]]:
    """For each row its difference and tolerance, or the error."""
    found = []
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        oracles = distribute_jobs([row.train for row in chunk])
        for row, expected in zip(chunk, oracles, strict=True):
            names = ("part", "name", "tolerance", "is_global", "is_way")
            given = {name: getattr(row, name) for name in names}
            try:
                given["difference"], given["tolerance"] = row.compare(expected)
            except Exception:  # reported in the row; the next one is measured
                given["error"] = traceback.format_exc()
            given["is_measured"] = given["tolerance"] != row.tolerance
            found.append(given)
            if keras_dist.rank() == 0:
                print(json.dumps(given), flush=True)
    return found


def main(path, pattern=""):
    """Writes the versions and the rows."""
    warnings.filterwarnings("error", "Training without XLA")
    shared = [case.shared for case in CASES if "op" not in case.averaging]
    rows = [make_row(case) for case in (*CASES, *shared)]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(keras_dist.broadcast(own))
        kinds = [(way, is_global) for is_global in (False, True) for way in WAYS]
        rows += [make_row_of_way(*kind, folder) for kind in kinds]
        chosen = [row for row in rows if re.search(pattern, f"{row.part}: {row.name}")]
        found = measure(chosen)
        keras_dist.gather("read")  # before the folder is removed
    if keras_dist.rank() == 0:
        versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
        Path(path).write_text(json.dumps({"versions": versions, "rows": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
