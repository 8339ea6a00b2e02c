"""All ranks against one process: writes docs/equivalence.md, and each case beside it.

With a pattern, what matches it alone is measured, and takes the place of the same cases
in equivalence.json: `equivalence.py '^(random numbers|generative):'`.
"""

import datetime
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from harness.launching import ROOT, launch

PAGE = ROOT / "docs" / "equivalence.md"
EACH = PAGE.with_suffix(".json")

_PAGE = """# N ranks against one process

**All {trainings} trainings of {cases} cases, on 2 and on 3 ranks, gave the weights and
the optimizer state of plain Keras on one process, within rounding; all ranks were
bitwise identical after each.**

Written by `make equivalence` on {date}, with {versions}, Horovod over
Gloo, on CPUs; [equivalence.json](equivalence.json) has the numbers of each case.

A case trains for two epochs: by plain `fit` on one process with the global batch, and
by `dist_fit`; in the columns "global" with `batch="global"`, and batches that do not
divide evenly. A number is the largest difference of any weight or any part of the
optimizer's state, relative to the largest value in its tensor, of all trainings in the
row.

| part | tolerance | trainings | 2 ranks | 2, global | 3 ranks | 3, global |
|---|---|---|---|---|---|---|
{table}

Rows with "keras.io" are small models (`tests/harness/keras_ways/`), each trained like
an example or a guide of Keras; their logs are compared, too. 1e-10 is the tolerance of
float64: for these models, and where an optimizer amplifies rounding in float32. In
float16, bfloat16 and with compression, it is a few roundings of a number.
"""

_KINDS = ("2", "2 global", "3", "3 global")


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


def merge(known, results):
    """The cases of the file, with what was measured in place of the same ones."""
    cases = {(case["is_way"], case["part"], case["name"]): case for case in known}
    for ranks, result in results.items():
        for row in result["rows"]:
            key = row["is_way"], row["part"], row["name"]
            new = dict(zip(("is_way", "part", "name"), key, strict=True))
            found = cases.setdefault(key, new | {"found": {}})["found"]
            kind = f"{ranks}{' global' * row['is_global']}"
            found[kind] = [float(f"{row['difference']:.1e}"), row["tolerance"]]
    return list(cases.values())


def lines(measured):
    """JSON with a line for each case."""
    head = json.dumps({**measured, "cases": []})
    cases = (json.dumps(case, ensure_ascii=False) for case in measured["cases"])
    return head.removesuffix("[]}") + "[\n" + ",\n".join(cases) + "\n]}\n"


def page(measured):
    """The text of docs/equivalence.md."""
    worst, trainings = defaultdict(dict), defaultdict(int)
    for case in measured["cases"]:
        title = case["part"][0].upper() + case["part"][1:]
        for kind, (difference, tolerance) in case["found"].items():
            row = worst[title + ", keras.io" * case["is_way"], tolerance]
            row[kind] = max(difference, row.get(kind, 0))
            trainings[title + ", keras.io" * case["is_way"], tolerance] += 1
    table = []
    for (title, tolerance), row in worst.items():
        numbers = [f"{row[kind]:.1e}" if kind in row else "–" for kind in _KINDS]
        cells = (title, f"{tolerance:.1e}", str(trainings[title, tolerance]), *numbers)
        table.append(f"| {' | '.join(cells)} |")
    versions = measured["versions"].items()
    return _PAGE.format(
        trainings=sum(trainings.values()),
        cases=len(measured["cases"]),
        date=measured["date"],
        versions=" and ".join(f"{name} {version}" for name, version in versions),
        table="\n".join(table),
    )


def main(arguments):
    """Returns the exit code."""
    results = {ranks: run(ranks, *arguments) for ranks in (2, 3)}
    if not all([report(ranks, found["rows"]) for ranks, found in results.items()]):
        return 1
    known = json.loads(EACH.read_text())["cases"] if arguments else []
    measured = {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "versions": results[2]["versions"],
        "cases": merge(known, results),
    }
    EACH.write_text(lines(measured))
    PAGE.write_text(page(measured))
    print(f"Written: {PAGE.relative_to(ROOT)}, {EACH.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
