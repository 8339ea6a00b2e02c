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
from pathlib import Path

import keras
import tensorflow as tf
from cases import CASES
from claims import assert_equal_to_the_bit, distribute_jobs
from keras_ways import WAYS
from keras_ways.way import difference, digest, train_plainly

import keras_dist

# Oracles that are computed at a time, each one on one rank.
CHUNK = 12


def make_case_row(case):
    """Return what is known of a case, its oracle, and what compares with it."""
    size = keras_dist.size()

    def compare(expected):
        found, tolerance, model = case.measure(size, expected)
        assert_equal_to_the_bit(model)
        return found, tolerance

    row = {"part": case.part, "name": case.name, "tolerance": case.tolerance}
    row |= {"is_global": case.is_global, "is_way": False}
    return row, functools.partial(case.state_of_one_process, size), compare


def make_way_row(way, is_global, folder):
    """The same of a way, in float64, in which rounding hides nothing."""
    size, own = keras_dist.size(), folder / f"{WAYS.index(way)} {is_global}"
    tolerance = way.tolerance("float64")

    def compare(expected):
        run = way.run_of(size, folder, is_oracle=False, is_global=is_global)
        ours = way.arrays(run, "float64")
        assert len(set(keras_dist.gather(digest(ours)))) == 1
        return difference(ours, expected)[0], tolerance

    row = {"part": way.part, "name": way.name, "tolerance": tolerance}
    row |= {"is_global": is_global, "is_way": True}
    return row, lambda: train_plainly(way, "float64", is_global, size, own), compare


def measure(rows):
    """For each row its difference and tolerance, or the error."""
    found = []
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        oracles = distribute_jobs([train for _, train, _ in chunk])
        for (row, _, compare), expected in zip(chunk, oracles, strict=True):
            usual = row["tolerance"]
            try:
                row["difference"], row["tolerance"] = compare(expected)
            except Exception:  # reported in the row; the next one is measured
                row["error"] = traceback.format_exc()
            row["is_measured"] = row["tolerance"] != usual
            found.append(row)
            if keras_dist.rank() == 0:
                print(json.dumps(row), flush=True)
    return found


def main(path, pattern=""):
    """Writes the versions and the rows."""
    warnings.filterwarnings("error", "Training without XLA")
    shared = [case.shared for case in CASES if "op" not in case.averaging]
    rows = [make_case_row(case) for case in (*CASES, *shared)]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(keras_dist.broadcast(own))
        for is_global in (False, True):
            rows += [make_way_row(way, is_global, folder) for way in WAYS]
        rows = [r for r in rows if re.search(pattern, "{part}: {name}".format(**r[0]))]
        found = measure(rows)
        keras_dist.gather("read")  # before the folder is removed
    if keras_dist.rank() == 0:
        versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
        Path(path).write_text(json.dumps({"versions": versions, "rows": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
