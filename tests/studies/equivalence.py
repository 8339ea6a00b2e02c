"""All ranks against one process.

Usage, with PYTHONPATH=tests and the arguments of tests/studies/equivalence.py:

    (none)            write docs/equivalence.md
    cases             write all but the part of keras.io
    ways              write its part of keras.io alone
"""

import json
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from launch import ROOT, launch

PAGE = ROOT / "docs" / "equivalence.md"

# The tolerance in float32, as `TOLERANCES` in tests/ranks/keras_ways/way.py has it.
SINGLE = 1e-5

_HEAD = """# N ranks against one process

Written by `make equivalence`, with {versions}, Horovod over Gloo, on CPUs.

Each case trains for two epochs: on one process with the global batch, by plain
`keras.Model.fit` with the learning rate multiplied by hand, and by `dist_fit` on 2 and
on 3 ranks. In the columns `batch="global"` the ranks share batches that do not divide
evenly among them, and the script of one process is the same but for `fit`. The numbers
are the largest differences of any weight and any part of the optimizer's state,
relative to the largest value of its tensor. After each case all ranks held the same
bits.

The tolerance is 1.0e-05, or the number in brackets. One with a * belongs to an
optimizer that amplifies rounding errors (by a sign, or a division by a small moment):
it is the largest difference of three runs of one process that sum the same batches in
another order. In float16, bfloat16 and with compression, the tolerance is a few
roundings of a number.
"""

_WAYS = """## Ways to train that keras.io shows

Small models of `tests/ranks/keras_ways/`, each trained as an example or a guide of
Keras trains its own: by plain `fit` on one process with the global batch, and by
`dist_fit` at the same learning rate. All weights, the state of the optimizers and the
logs are compared. The tolerance is 1e-10 in float64 and 1e-5 in float32; where a name
has a *, Keras itself computes a part in float32, and 1e-5 is that of both. A + stands
behind a number above it in a tensor that is nearly zero: the difference itself is at
most 1e-7 there, the rounding of a number near one. After each training all ranks held
the same bits.
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
    return "\n".join([_HEAD.format(versions=software), *tables(results).values()])


def tables(results):
    """The text about each part, by its title."""
    kinds = [(ranks, is_global) for ranks in (2, 3) for is_global in (False, True)]
    found = {
        (ranks, row["is_global"], row["part"], row["name"]): row
        for ranks, result in results.items()
        for row in result["rows"]
    }
    rows = [row for row in results[2]["rows"] if not row["is_global"]]
    columns = [
        [found.get((*kind, row["part"], row["name"])) for row in rows] for kind in kinds
    ]
    shared = ', batch="global"'
    heads = [f"{ranks} ranks" + shared * is_global for ranks, is_global in kinds]
    texts = {}
    for part, rows in groupby(zip(*columns, strict=True), key=lambda c: c[0]["part"]):
        is_code = "_" in part
        title = f"## `{part}`" if is_code else f"## {part[0].upper()}{part[1:]}"
        lines = [title, ""]
        lines += [f"| case | {' | '.join(heads)} |", "|---" * 5 + "|"]
        for of_kinds in rows:
            cells = [f"`{of_kinds[0]['name']}`", *map(_case_cell, of_kinds)]
            lines += [f"| {' | '.join(cells)} |"]
        texts[title] = "\n".join([*lines, ""])
    return texts


def _case_cell(row):
    """The difference, and its tolerance if it is not the usual one; – if not tried."""
    if row is None:
        return "–"
    mark = "*" if row["is_measured"] else ""
    usual = row["tolerance"] == SINGLE and not mark
    tolerance = "" if usual else f" ({row['tolerance']:.1e}{mark})"
    return f"{row['difference']:.1e}{tolerance}"


def ways_of_page(results):
    """The text of docs/equivalence.md about the ways of keras.io."""
    lines = [_WAYS]
    kinds = [("float64", False), ("float32", False), ("float64", True)]
    rows = [
        [
            row
            for row in results[ranks]["rows"]
            if (row["dtype"], row["is_global"]) == kind
        ]
        for ranks in (2, 3)
        for kind in kinds
    ]
    columns = list(zip(*rows, strict=True))
    for part, of_part in groupby(columns, key=lambda column: column[0]["part"]):
        lines += [f"### {part[0].upper()}{part[1:]}", ""]
        cells = [f'{n} ranks, float64 | float32 | batch="global"' for n in (2, 3)]
        lines += [f"| way | {' | '.join(cells)} |", "|---" * 7 + "|"]
        for column in of_part:
            is_single = column[0]["tolerance"] == SINGLE
            cells = [column[0]["name"] + (" *" if is_single else "")]
            cells += map(_way_cell, column)
            lines += [f"| {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)


def _way_cell(row):
    """The difference, with its mark where it is above the tolerance of all ways."""
    return f"{row['difference']:.1e}" + " +" * (row["difference"] > SINGLE)


def measured(*arguments):
    """What 2 and 3 ranks have measured; `None` if not all cases hold."""
    results = {ranks: run(ranks, *arguments) for ranks in (2, 3)}
    all_hold = all([report(ranks, found["rows"]) for ranks, found in results.items()])
    return results if all_hold else None


def main(arguments):
    """Returns the exit code."""
    title = _WAYS.splitlines()[0]
    before, _, after = PAGE.read_text().partition(title)
    after = title + after
    if arguments[:1] != ["ways"]:
        if (cases := measured()) is None:
            return 1
        before = page(cases)
    if arguments[:1] != ["cases"]:
        if (ways := measured("ways", *arguments[1:])) is None:
            return 1
        after = ways_of_page(ways)
    if not arguments[1:]:
        PAGE.write_text(before.rstrip("\n") + "\n\n" + after)
        print(f"Written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
