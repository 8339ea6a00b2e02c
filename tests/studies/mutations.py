"""Break one line at a time, and see that a test fails.

A test is useless if it passes when the code that it tests is broken. Each mutation of
mutations.txt is made in a copy of the repository, where the tests named with it run on
two ranks: text that occurs once in a file of the package, and text that replaces it.
"""

import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from harness.launching import ROOT, RUN, launch


class Mutation(NamedTuple):
    """What is replaced, and the test file with options of pytest."""

    file: str
    tests: str
    line: str
    broken: str

    def __str__(self) -> str:
        """What is broken, for whom."""
        return f"{self.file}: {self.tests}"


def read_mutations() -> list[Mutation]:
    """Read mutations.txt: a head, lines that are there, and wrong ones."""
    text = Path(__file__).with_suffix(".txt").read_text()
    parts = re.findall(r"^@ (.+?): (.+)\n((?:[-+].*\n)+)", text, re.MULTILINE)
    return [
        Mutation(
            *head, *("\n".join(re.findall(rf"^[{s}](.*)", lines, re.M)) for s in "-+")
        )
        for *head, lines in parts
    ]


MUTATIONS = read_mutations()


def notice(mutation: Mutation) -> str:
    """The result of the tests: "failed", "hung", or "" if they pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("keras_dist", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "keras_dist" / mutation.file
        path.write_text(path.read_text().replace(mutation.line, mutation.broken))
        run = [*RUN, "-np", "2", "-m", "pytest"]
        tests = shlex.split(f"-x -q tests/ranks/{mutation.tests}")
        command = f"cd {copy} && exec {shlex.join([*run, *tests])}"
        env = {"LONG_TESTS": "1", "PYTHONPATH": f"{copy}"}
        try:
            done = launch(["sh", "-c", command], timeout=240, env=env)
        except TimeoutError:  # a broken collective may leave the ranks waiting
            return "hung"
        output = done.stdout + done.stderr
        # Not the exit code: pytest also fails if it selects no test.
        is_noticed = " failed" in output or "has been shut down" in output
        is_hung = "no rank has made progress" in output
        return "hung" if is_hung else "failed" if is_noticed else ""


def main(words: list[str]) -> int:
    """Try mutations that contain one of `words`, or all; return an exit code."""
    chosen = [m for m in MUTATIONS if not words or any(w in str(m) for w in words)]
    found = []
    for mutation in chosen:
        found.append(notice(mutation))
        print(f"{found[-1] or 'MISSED':<6}  {mutation}", flush=True)
    print(f"{sum(map(bool, found))} of {len(found)} mutations noticed")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
