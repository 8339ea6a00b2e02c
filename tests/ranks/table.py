"""Measures cases on all ranks; the first rank writes the results to a file.

Usage: python table.py FILE               all of `cases.CASES`
       python table.py FILE ways [PATTERN]  ways of keras.io that match: title, dtype,
                                            and "global" where the ranks share batches
"""

import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import cases
import keras
import tensorflow as tf
from claims import assert_equal_to_the_bit, distribute_jobs
from keras_ways import WAYS
from keras_ways.way import (
    difference,
    digest,
    is_rounding,
    oracles,
)

import keras_dist

# Oracles that are computed at a time, each one on one rank.
CHUNK = 12


def measure(chosen, size):
    """For each case its name, difference and tolerance, or the error."""
    found = []
    for start in range(0, len(chosen), CHUNK):
        chunk = chosen[start : start + CHUNK]
        oracles = distribute_jobs(
            [lambda case=case: case.state_of_one_process(size) for case in chunk]
        )
        for case, expected in zip(chunk, oracles, strict=True):
            row = {"part": case.part, "name": case.name, "tolerance": case.tolerance}
            row["is_global"] = case.is_global
            try:
                row["difference"], row["tolerance"], model = case.measure(
                    size, expected
                )
                assert_equal_to_the_bit(model)
            except Exception:  # reported in the row; the next case is measured
                row["error"] = traceback.format_exc()
            row["is_measured"] = row["tolerance"] != case.tolerance
            found.append(row)
            if keras_dist.rank() == 0:
                print(json.dumps(row), flush=True)
    return found


def measure_ways(pattern, size):
    """For each way and dtype the difference and the tolerance, or the error."""
    kinds = [("float64", False), ("float32", False), ("float64", True)]
    chosen = [
        (way, *kind)
        for way in WAYS
        for kind in kinds
        if re.search(pattern, f"{way.title}, {kind[0]}{', global' * kind[1]}")
    ]
    found = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(keras_dist.broadcast(own))
        for start in range(0, len(chosen), CHUNK):
            chunk = chosen[start : start + CHUNK]
            expected = oracles(chunk, size, folder / f"{start}")
            for item, arrays in zip(chunk, expected, strict=True):
                way, dtype, is_global = item
                row = {"part": way.part, "name": way.name, "dtype": dtype}
                row |= {"tolerance": way.tolerance(dtype), "is_global": is_global}
                begin = time.perf_counter()
                try:
                    run = way.run_of(size, folder, is_oracle=False, is_global=is_global)
                    ours = way.arrays(run, dtype)
                    row["difference"], row["array"] = difference(ours, arrays)
                    if dtype == "float32" and is_rounding(ours, arrays):
                        row["tolerance"] = max(row["tolerance"], row["difference"])
                    assert len(set(keras_dist.gather(digest(ours)))) == 1
                except Exception:  # reported in the row; the next way is measured
                    row["error"] = traceback.format_exc()
                    print(row["error"], file=sys.stderr, flush=True)
                row["seconds"] = time.perf_counter() - begin
                found.append(row)
                if keras_dist.rank() == 0:
                    print(json.dumps(row), flush=True)
        keras_dist.gather("read")  # before the folder is removed
    return found


def main(path, *chosen_by):
    """Writes the versions and the rows."""
    size = keras_dist.size()
    if chosen_by and chosen_by[0] == "ways":
        rows = measure_ways("".join(chosen_by[1:]), size)
    else:
        warnings.filterwarnings("error", "Training without XLA")
        shared = [case.shared for case in cases.CASES if "op" not in case.averaging]
        chosen = [*cases.CASES, *shared]
        rows = measure(chosen, size)
    if keras_dist.rank() == 0:
        versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
        with open(path, "w") as file:
            json.dump({"versions": versions, "rows": rows}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
