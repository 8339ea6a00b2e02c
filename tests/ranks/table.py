"""Measures cases on all ranks; the first rank writes the results to a file.

Usage: python table.py FILE               all of `cases.CASES`
       python table.py FILE FIRST COUNT   random cases, those drawn for so many ranks
"""

import json
import sys
import traceback
import warnings

import cases
import fuzz
import keras
import tensorflow as tf
from claims import assert_equal_to_the_bit, distribute_jobs

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


def main(path, *numbers):
    """Writes the versions and the rows."""
    size = keras_dist.size()
    chosen = cases.CASES
    if numbers:
        first, count = map(int, numbers)
        drawn = [fuzz.draw(seed) for seed in range(first, first + count)]
        chosen = [case for ranks, case in drawn if ranks == size]
    else:
        warnings.filterwarnings("error", "Training without XLA")
    rows = measure(chosen, size)
    if keras_dist.rank() == 0:
        versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
        with open(path, "w") as file:
            json.dump({"versions": versions, "rows": rows}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
