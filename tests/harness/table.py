"""Measures cases and ways of keras.io on all ranks; the first rank writes a file.

Usage: python table.py FILE [PATTERN]   all, or those whose title matches
"""

import json
import re
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

import keras_dist
from harness.cases import CASES
from harness.claims import distribute_jobs
from harness.keras_ways import WAYS
from harness.keras_ways.way import Way

# Oracles that are computed at a time, each one on one rank.
CHUNK = 12


def measure(cases):
    """For each case its difference and tolerance, or the error."""
    found = []
    for start in range(0, len(cases), CHUNK):
        chunk = cases[start : start + CHUNK]
        oracles = distribute_jobs([case.oracle for case in chunk])
        for case, expected in zip(chunk, oracles, strict=True):
            row = {name: getattr(case, name) for name in ("part", "name", "is_global")}
            row |= {"tolerance": case.tolerance, "is_way": isinstance(case, Way)}
            try:
                row["difference"], row["tolerance"], _ = case.compare(expected)
            except Exception:  # reported in the row; the next one is measured
                row["error"] = traceback.format_exc()
            row["is_measured"] = row["tolerance"] != case.tolerance
            found.append(row)
            if keras_dist.rank() == 0:
                print(json.dumps(row), flush=True)
    return found


def main(path, pattern=""):
    """Writes the versions and the rows."""
    warnings.filterwarnings("error", "Training without XLA")
    cases = [*CASES, *(case.shared for case in CASES if "op" not in case.averaging)]
    cases += [replace(way, is_global=each) for each in (False, True) for way in WAYS]
    found = measure([c for c in cases if re.search(pattern, f"{c.part}: {c.name}")])
    if keras_dist.rank() == 0:
        versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
        Path(path).write_text(json.dumps({"versions": versions, "rows": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
