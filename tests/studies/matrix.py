"""Try versions together, each case in an environment of its own: `make matrix`.

For each case: a new environment with the wheel of keras_dist and these versions, as
`pip install` makes it; Horovod from a folder of wheels, without a compiler, or built;
then `keras-dist check`, the demo, and at the corners of the ranges all tests of ranks,
on two ranks. `docs/reference/versions.json` keeps what came of it.

    python tests/studies/matrix.py [--wheels DIR] [--only TEXT] [nightly]

`nightly` tries what users will install next, and writes nothing.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "reference" / "versions.json"

# Without importing the package, which needs TensorFlow.
VERSION = runpy.run_path(str(ROOT / "keras_dist" / "version.py"))

# What builds Horovod; an environment that takes a wheel must not need it.
_BUILD = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang(\+\+)?|make|cmake|nvcc)(-\d+)?")


@dataclasses.dataclass(frozen=True)
class Case:
    """Versions that are tried together.

    Args:
        python: Major and minor version.
        tensorflow: What pip is asked for; the newest release or candidate of it.
        keras: What pip is asked for.
        is_corner: Whether the tests of ranks run, too.
    """

    python: str
    tensorflow: str
    keras: str
    is_corner: bool = False


def _tensorflow(version: str) -> str:
    return f"tensorflow>={version}.0rc0,=={version}.*"


NEWEST = "keras>=3.15"


def _keras(minor: tuple[int, int]) -> str:
    return f"keras=={VERSION['dotted'](minor)}.*"


def _cases() -> list[Case]:
    """Each claimed pair of TensorFlow and Python, with the newest Keras.

    The corners: the oldest and the newest TensorFlow with the oldest and the newest
    Python and Keras. TensorFlow 2.18 and 2.19 have no wheels for Python 3.13, and 2.21
    and later need Keras 3.12.
    """
    corners, others = [], []
    first, last = VERSION["FIRST_TENSORFLOW"][1], VERSION["LAST_TENSORFLOW"][1]
    for minor in range(first, last + 1):
        pythons = ["3.11", "3.12", "3.13"][: 2 if minor < 20 else 3]
        oldest = VERSION["OLDEST_KERAS"] if minor < 21 else (3, 12)
        for python in pythons:
            is_corner = minor in (first, last) and python in (pythons[0], pythons[-1])
            for keras in [_keras(oldest), NEWEST] if is_corner else [NEWEST]:
                case = Case(python, _tensorflow(f"2.{minor}"), keras, is_corner)
                (corners if is_corner else others).append(case)
    return corners + others


CASES = _cases()
NIGHTLY = Case("3.11", "tensorflow>=2.22.0rc0", "keras-nightly", is_corner=True)


def main() -> None:
    """Try the cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheels", type=Path, help="wheels of Horovod, with their sums"
    )
    parser.add_argument("--only", default="", help="a part of the case's description")
    parser.add_argument("nightly", nargs="?", choices=["nightly"])
    arguments = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # pip would find packages there installed
    cases = [NIGHTLY] if arguments.nightly else CASES
    failed = []
    for case in cases:
        name = f"Python {case.python}, {case.tensorflow}, {case.keras}"
        if arguments.only not in name:
            continue
        print(f"== {name}", flush=True)
        result = try_out(case, arguments.wheels)
        print(json.dumps(result), flush=True)
        if not arguments.nightly:
            keep(result)
        if not result["passed"]:
            failed.append(name)
    if failed:
        sys.exit("Failed: " + "; ".join(failed))


def try_out(case: Case, wheels: Path | None) -> dict:
    """Make the environment, and run what belongs to the case.

    Args:
        case: The versions.
        wheels: Folder for `--find-links`; without it Horovod is built.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keras-dist-matrix-") as folder:
        place = Path(folder)
        python = _environment(case, place)
        path = f"{python.parent}:{os.environ['PATH']}"
        if wheels is not None:
            path = f"{python.parent}:{_without_compilers(place / 'bin')}"
        env = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(place / "env")}

        def run(*command: str, cwd: Path = place) -> str:
            done = subprocess.run(
                command, env=env, cwd=cwd, text=True, capture_output=True, check=False
            )
            log = done.stdout + done.stderr
            if done.returncode != 0:
                print(log[-20000:], flush=True)
                raise _Failed(f"{command[0]}: exit code {done.returncode}")
            return log

        links = ["--find-links", str(wheels)] if wheels is not None else []
        steps = {
            "Horovod": [
                "keras-dist",
                "install-horovod",
                "--no-mpi",
                "--no-nccl",
                *links,
            ],
            "check": ["keras-dist", "check", "-np", "2"],
            "demo": ["keras-dist", "run", "-np", "2", str(ROOT / "examples/digits.py")],
        }
        record = {"date": f"{datetime.date.today()}", "python": case.python}
        record |= {"corner": case.is_corner, "passed": False, "ranks": "not run"}
        record |= {"horovod": "none"} | dict.fromkeys(steps, "not run")
        try:
            found = re.findall(r"^{.*}$", run(str(python), "-c", _VERSIONS), re.M)
            record |= json.loads(found[-1])
            for name, command in steps.items():
                record[name] = "failed"
                log = run(*command)
                record[name] = "passed"
                if name == "Horovod":
                    record["horovod"] = (
                        "wheel" if "is taken, and not" in log else "built"
                    )
            if case.is_corner:
                record["ranks"] = "failed"
                tests = ["tests/test_private.py", "tests/test_ranks.py"]
                pytest = [str(python), "-m", "pytest", "-q", "-k", "private or 2-"]
                run(*pytest, "-p", "no:cacheprovider", *tests, cwd=ROOT)
                record["ranks"] = "passed"
            record["passed"] = True
        except _Failed as failure:
            print(failure, flush=True)
        record["minutes"] = round((time.monotonic() - start) / 60)
    return record


class _Failed(Exception):
    """A step of a case; what it printed is printed."""


_VERSIONS = (
    "import json, platform, keras, tensorflow; print(json.dumps({'python': "
    "platform.python_version(), 'keras': keras.__version__, 'tensorflow': "
    "tensorflow.__version__}))"
)


def _environment(case: Case, place: Path) -> Path:
    """Install the versions and a wheel of keras_dist; return the Python there."""
    subprocess.run([f"python{case.python}", "-m", "venv", place / "env"], check=True)
    python = place / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "-w", place, ROOT]
    subprocess.run(wheel, check=True)
    (made,) = place.glob("keras_dist-*.whl")
    # Without the extra `dev`, which keeps TensorFlow in the claimed range.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    tools = [one for one in dev if not one.startswith("keras-dist[")]
    subprocess.run([*pip, "install", str(made), case.tensorflow, *tools], check=True)
    # A candidate of TensorFlow brings `keras-nightly`, which has the files of `keras`,
    # too: the one that is tried comes last.
    keras = [*pip, "install", "--no-deps", "--force-reinstall"]
    keras += ["--pre"] if "nightly" in case.keras else []
    subprocess.run([*keras, case.keras], check=True)
    return python


def _without_compilers(folder: Path) -> Path:
    """Make a folder with the commands of this system, but those that build."""
    folder.mkdir()
    for command in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        link = folder / command.name
        if not _BUILD.fullmatch(command.name) and not link.is_symlink():
            link.symlink_to(command)
    assert shutil.which("g++", path=str(folder)) is None
    return folder


def keep(result: dict) -> None:
    """Write a result to the file of the page, in place of an older one of the case."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    cases = {_minors(one): one for one in [*known, result]}
    kept = [cases[minors] for minors in sorted(cases)]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def _minors(result: dict) -> tuple[tuple[int, ...], ...]:
    """Major and minor version of TensorFlow, Python and Keras."""
    names = ("tensorflow", "python", "keras")
    return tuple(
        tuple(int(number) for number in re.findall(r"\d+", result.get(name, ""))[:2])
        for name in names
    )


if __name__ == "__main__":
    main()
