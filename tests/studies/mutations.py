"""Break one line at a time, and see that a test fails.

A test is useless if it passes when the code that it tests is broken. Each mutation of
mutations.txt is made in a copy of the repository, where the tests named with it run on
two ranks.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A broken collective may leave the ranks waiting: that is a failure too.
SECONDS = 240


@dataclass(frozen=True)
class Mutation:
    """A line of the package, and a wrong one that replaces it.

    Args:
        file: The file of the package.
        line: Text that occurs exactly once in the file.
        broken: Text that replaces it.
        tests: The test file, and options of pytest.
    """

    file: str
    line: str
    broken: str
    tests: str

    def __str__(self) -> str:
        """What is broken, for whom."""
        return f"{self.file}: {self.tests}"


def read_mutations() -> list[Mutation]:
    """Return those of mutations.txt: a head, lines that are there, and wrong ones."""
    text = Path(__file__).with_suffix(".txt").read_text()
    parts = re.findall(r"^@ (.+?): (.+)\n((?:[-+].*\n)+)", text, re.MULTILINE)
    found = []
    for file, tests, lines in parts:
        sides = ["\n".join(re.findall(rf"^[{s}](.*)", lines, re.M)) for s in "-+"]
        found.append(Mutation(file, *sides, tests))
    return found


MUTATIONS = read_mutations()


def notice(mutation: Mutation) -> str:
    """The result of the tests: "failed", "hung", or "" if they pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("keras_dist", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "keras_dist" / mutation.file
        text = path.read_text()
        if text.count(mutation.line) != 1:
            sys.exit(f"Not once in {mutation.file}: {mutation.line}")
        path.write_text(text.replace(mutation.line, mutation.broken))
        run = [sys.executable, "-m", "keras_dist", "run", "-np", "2"]
        tests = [
            "-m",
            "pytest",
            "-x",
            "-q",
            *shlex.split(f"tests/ranks/{mutation.tests}"),
        ]
        process = subprocess.Popen(
            [*run, *tests],
            cwd=copy,
            env={
                **os.environ,
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "70",
                "LONG_TESTS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            process.communicate()
            return "hung"
        # Not the exit code: pytest also fails if it selects no test.
        is_noticed = " failed" in output or "has been shut down" in output
        if "no rank has made progress" in output:
            return "hung"
        return "failed" if is_noticed else ""


def main(words: list[str]) -> int:
    """Try mutations that contain one of `words`, or all; return an exit code."""
    chosen = [m for m in MUTATIONS if not words or any(w in str(m) for w in words)]
    missed = []
    for mutation in chosen:
        how = notice(mutation)
        print(f"{how or 'MISSED':<6}  {mutation}", flush=True)
        missed += [] if how else [mutation]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
