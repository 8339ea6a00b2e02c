"""`make equivalence` and `make fuzz`: all ranks against one process.

Usage: python tests/equivalence.py                   writes docs/equivalence.md
       python tests/equivalence.py fuzz FIRST COUNT  tries random cases only
"""

import json
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from launch import ROOT, launch

PAGE = ROOT / "docs" / "equivalence.md"

_HEAD = """# N ranks against one process

Written by `make equivalence`, with {versions}, Horovod over Gloo, on CPUs.

Each case trains for two epochs: on one process with the global batch, by plain
`keras.Model.fit` with the learning rate multiplied by hand, and by `dist_fit` on 2 and
on 3 ranks. The numbers are the largest differences of any weight and any part of the
optimizer's state, relative to the largest value of its tensor. After each case all
ranks held the same bits.

A tolerance with a * belongs to an optimizer that amplifies rounding errors (by a sign,
or a division by a small moment): it is the largest difference of three runs of one
process that sum the same batches in another order. In float16, bfloat16 and with
compression, the tolerance is a few roundings of a number.
"""


def run(ranks, *arguments):
    """The versions and the rows that so many ranks have measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        script = ROOT / "tests" / "ranks" / "table.py"
        found = [str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(":")]
        done = launch(
            [sys.executable, str(script), str(path), *arguments],
            ranks=ranks,
            timeout=3600,
            env={"PYTHONPATH": ":".join(filter(None, found))},
        )
        if not path.exists():
            sys.exit(done.stdout[-5000:] + done.stderr[-5000:])
        return json.loads(path.read_text())


def is_held(row):
    """Whether a row is within its tolerance."""
    return "error" not in row and row["difference"] <= row["tolerance"]


def report(ranks, rows):
    """Print the cases that fail, and how many hold."""
    for row in rows:
        if not is_held(row):
            reason = (
                row.get("error") or f"{row['difference']:.1e} > {row['tolerance']:.1e}"
            )
            print(f"{ranks} ranks, {row['part']}: {row['name']}: {reason}")
    held = sum(map(is_held, rows))
    print(f"{ranks} ranks: {held} of {len(rows)} cases hold", flush=True)
    return held == len(rows)


def page(results):
    """The text of docs/equivalence.md."""
    versions = results[2]["versions"]
    software = " and ".join(f"{name} {version}" for name, version in versions.items())
    lines = [_HEAD.format(versions=software)]
    pairs = list(zip(results[2]["rows"], results[3]["rows"], strict=True))
    for part, rows in groupby(pairs, key=lambda pair: pair[0]["part"]):
        lines += [f"## {part[0].upper()}{part[1:]}", ""]
        lines += ["| case | 2 ranks | tolerance | 3 ranks | tolerance |"]
        lines += ["|---|---|---|---|---|"]
        for pair in rows:
            cells = [f"`{pair[0]['name']}`"]
            for row in pair:
                mark = "*" if row["is_measured"] else ""
                cells += [f"{row['difference']:.1e}", f"{row['tolerance']:.1e}{mark}"]
            lines += [f"| {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)


def main(arguments):
    """Returns the exit code."""
    results = {ranks: run(ranks, *arguments[1:]) for ranks in (2, 3)}
    all_hold = all([report(ranks, found["rows"]) for ranks, found in results.items()])
    if all_hold and not arguments:
        PAGE.write_text(page(results))
        print(f"Written: {PAGE.relative_to(ROOT)}")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
