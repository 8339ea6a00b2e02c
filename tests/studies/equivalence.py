"""All ranks against one process: writes docs/equivalence.md.

With a pattern, what matches it alone is measured, and the tables of these parts are
written anew: `equivalence.py '^(random numbers|generative):'`.
"""

import json
import os
import re
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from harness.launching import ROOT, launch

PAGE = ROOT / "docs" / "equivalence.md"

# The tolerance of cases in float32.
SINGLE = 1e-5

_HEAD = """# N ranks against one process

Written by `make equivalence`, with {versions}, Horovod over Gloo, on CPUs.

Each case trains for two epochs: on one process with the global batch, by plain
`keras.Model.fit` with the learning rate multiplied by hand, and by `dist_fit` on 2 and
on 3 ranks. In the columns `batch="global"`, the ranks share batches that do not divide
evenly among them, and the script for one process differs only in the call of `fit`. The
numbers are the largest difference of any weight or any part of the optimizer's state,
relative to the largest value in its tensor. After each case, all ranks were bitwise
identical.

The tolerance is 1.0e-05, or the number in brackets. With a *, both are from a run in
float64: in float32, the optimizer amplifies rounding errors (by a sign, or a division
by a small moment) beyond the tolerance. In float16, bfloat16 and with compression, the
tolerance is a few roundings of a number.
"""

_WAYS = """## Ways to train that keras.io shows

Small models in `tests/harness/keras_ways/`, each trained like an example or a guide of
Keras: by plain `fit` on one process with the global batch, and by `dist_fit` at the
same learning rate, in float64. All weights, the state of the optimizers and the logs
are compared. The tolerance is 1e-10; for a name with a *, Keras computes a part in
float32, and the tolerance is 1e-5. After each training, all ranks were bitwise
identical.
"""


def run(ranks, *arguments):
    """The versions and the rows that so many ranks have measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        script = ROOT / "tests" / "harness" / "table.py"
        found = [str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(":")]
        env = {"PYTHONPATH": ":".join(filter(None, found))}
        done = launch([script, path, *arguments], ranks=ranks, timeout=3600, env=env)
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
            gap = "{difference:.1e} > {tolerance:.1e}"
            reason = row.get("error") or gap.format(**row)
            print(f"{ranks} ranks, {row['part']}: {row['name']}: {reason}")
    held = sum(map(is_held, rows))
    print(f"{ranks} ranks: {held} of {len(rows)} cases hold", flush=True)
    return held == len(rows)


def page(results):
    """The text of docs/equivalence.md."""
    versions = results[2]["versions"]
    software = " and ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join([_HEAD.format(versions=software), *tables(results)])


def update(text, new):
    """The page with the sections of `new` in place of its own, or behind them."""
    old, found = (
        dict(re.findall(r"^(##+ .*)\n((?:(?!##).*\n?)*)", each, re.MULTILINE))
        for each in (text, new)
    )
    head = text[: text.index("\n## ") + 1]
    sections = (f"{title}\n{body.rstrip()}" for title, body in (old | found).items())
    return head + "\n\n".join(sections) + "\n"


def tables(results):
    """The tables of all parts, one after the other."""
    kinds = [(ranks, is_global) for ranks in (2, 3) for is_global in (False, True)]
    found = {
        (ranks, row["is_global"], row["part"], row["name"]): row
        for ranks, result in results.items()
        for row in result["rows"]
    }
    first = [row for row in results[2]["rows"] if not row["is_global"]]
    shared = ', batch="global"'
    heads = [f"{ranks} ranks" + shared * is_global for ranks, is_global in kinds]
    is_ways = False
    for part, rows in groupby(first, key=lambda row: row["part"]):
        rows = list(rows)
        if rows[0]["is_way"] and not is_ways:
            is_ways = True
            yield _WAYS
        title = f"`{part}`" if "_" in part else part[0].upper() + part[1:]
        yield f"{'###' if is_ways else '##'} {title}\n"
        yield f"| {'way' if is_ways else 'case'} | {' | '.join(heads)} |"
        yield "|---" * 5 + "|"
        for row in rows:
            cells = [found.get((*kind, part, row["name"])) for kind in kinds]
            yield f"| {_name(row)} | {' | '.join(map(_cell, cells))} |"
        yield ""


def _name(row):
    """A way has a * where Keras computes in float32."""
    is_single = " *" * (row["tolerance"] == SINGLE)
    return f"{row['name']}{is_single}" if row["is_way"] else f"`{row['name']}`"


def _cell(row):
    """The difference, and its tolerance if it is not the usual one; – if not tried."""
    if row is None:
        return "–"
    mark = "*" if row["is_measured"] else ""
    is_usual = row["is_way"] or row["tolerance"] == SINGLE and not mark
    tolerance = "" if is_usual else f" ({row['tolerance']:.1e}{mark})"
    return f"{row['difference']:.1e}{tolerance}"


def main(arguments):
    """Returns the exit code."""
    results = {ranks: run(ranks, *arguments) for ranks in (2, 3)}
    if not all([report(ranks, found["rows"]) for ranks, found in results.items()]):
        return 1
    text = page(results)
    PAGE.write_text(update(PAGE.read_text(), text) if arguments else text)
    print(f"Written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
