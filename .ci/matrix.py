"""Try versions together, an environment for each pair that is claimed: `make matrix`.

Each case has a new environment of uv with the wheel of keras_dist and these versions.
Horovod is a wheel of `make wheels`, or built; then come `keras-dist check`, the demo
and, at the corners of the ranges, all tests of ranks on two of them.
`docs/reference/versions.json` keeps what has passed.

    python .ci/matrix.py            all cases
    python .ci/matrix.py py313      those with this in their name
    python .ci/matrix.py nightly    what users will install next; writes nothing
"""

import datetime
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

RESULTS = Path("docs/reference/versions.json")
WHEELS = ("--find-links", "dist/wheels", "--wheel-dir", ".venv-matrix/wheels")

# Without importing the package, which needs TensorFlow.
VERSION = runpy.run_path("keras_dist/version.py")

_VERSIONS = (
    "import json, platform, keras, tensorflow; print(json.dumps({'tensorflow': "
    "tensorflow.__version__, 'python': platform.python_version(), 'keras': "
    "keras.__version__}))"
)


class Case(NamedTuple):
    """Versions to try together; at a corner of the ranges with all tests of ranks."""

    name: str
    python: str
    tensorflow: str
    keras: tuple[str, ...]
    is_corner: bool


# A candidate of TensorFlow, and last night's build of Keras.
NIGHTLY = ("--prerelease", "allow", "keras-nightly")
NEXT = Case("nightly", "3.11", "tensorflow>=2.22.0rc0", NIGHTLY, is_corner=True)


def list_cases() -> list[Case]:
    """Return each claimed pair of TensorFlow and Python, with the newest Keras.

    The corners: the oldest and the newest TensorFlow with the oldest and the newest
    Python and Keras. TensorFlow 2.18 and 2.19 have no wheels for Python 3.13, and 2.21
    and later need Keras 3.12.
    """
    cases = []
    first, last = VERSION["FIRST_TENSORFLOW"][1], VERSION["LAST_TENSORFLOW"][1]
    for minor in range(first, last + 1):
        pythons = ["3.11", "3.12", "3.13"][: 2 if minor < 20 else 3]
        keras = VERSION["OLDEST_KERAS"] if minor < 21 else (3, 12)
        oldest = VERSION["format_version"](keras)
        for python in pythons:
            is_corner = minor in (first, last) and python in (pythons[0], pythons[-1])
            name = f"py{python}_tf2.{minor}".replace(".", "")
            kerases = {f"{name}_newest": "keras>=3.15"}
            if is_corner:
                kerases[f"{name}_oldest"] = f"keras=={oldest}.*"
            tensorflow = f"tensorflow>=2.{minor}.0rc0,==2.{minor}.*"
            cases += [
                Case(case, python, tensorflow, (keras,), is_corner)
                for case, keras in kerases.items()
            ]
    return cases


def record(installed: dict, is_corner: bool) -> None:
    """Write down that these versions have passed."""
    date = f"{datetime.date.today()}"
    new = {**installed, "ranks": is_corner, "date": date}
    records = {_minors(each): each for each in json.loads(RESULTS.read_text())}
    records[_minors(new)] = new
    lines = ",\n".join(json.dumps(records[key]) for key in sorted(records))
    RESULTS.write_text(f"[\n{lines}\n]\n")


def try_versions(case: Case) -> dict:
    """Install versions, and run what belongs to them; return what was installed."""
    with tempfile.TemporaryDirectory(prefix="keras-dist-matrix-") as folder:
        python = f"{folder}/bin/python"
        path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "VIRTUAL_ENV": folder, "PATH": path}

        def run(*words: str) -> str:
            print("$", *words, flush=True)
            done = subprocess.run(words, env=env, check=True, text=True, stdout=-1)
            print(done.stdout, flush=True)
            return done.stdout

        def install(*words: str) -> None:
            run("uv", "pip", "install", "--python", python, *words)

        run("uv", "venv", "--python", case.python, folder)
        install(".", case.tensorflow, "--group", "tools")
        # A candidate of TensorFlow brings `keras-nightly`, which has the files of
        # `keras`, too: the one that is tried comes last.
        install("--no-deps", "--reinstall", *case.keras)
        output = run("python", "-c", _VERSIONS)
        run("keras-dist", "check", "-np", "2")  # over TensorFlow's collectives
        run("keras-dist", "run", "-np", "2", "examples/digits.py")
        if case.is_corner:
            run("keras-dist", "install-horovod", "--no-mpi", "--no-nccl", *WHEELS)
            run("keras-dist", "check", "-np", "2")
            tests = ["tests/test_private.py", "tests/ranks"]
            run("python", "-m", "pytest", "-q", "-k", "private or np2", *tests)
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Try the cases that the arguments name."""
    if sys.argv[1:] == [NEXT.name]:
        try_versions(NEXT)
        return
    failed = []
    for case in list_cases():
        if all(word in case.name for word in sys.argv[1:]):
            try:
                record(try_versions(case), case.is_corner)
            except subprocess.CalledProcessError as error:
                print(f"{case.name}: {error}", flush=True)
                failed.append(case.name)
    if failed:
        sys.exit(f"Failed: {' '.join(failed)}")


def _minors(record: dict) -> tuple:
    names = ("tensorflow", "python", "keras")
    return tuple(VERSION["parse_version"](record[name]) for name in names)


if __name__ == "__main__":
    main()
