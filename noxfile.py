"""Try versions together, a session for each pair that is claimed: `make matrix`.

Each session has a new environment with the wheel of keras_dist and these versions, as
`pip install` makes it. Horovod is a wheel of `make wheels`, or built; then come
`keras-dist check`, the demo and, at the corners of the ranges, all tests of ranks on
two of them. `docs/reference/versions.json` keeps what has passed.

    nox --list
    nox -k py313           the sessions of Python 3.13
    nox -s nightly         what users will install next; writes nothing
"""

import datetime
import json
import runpy
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["versions"]
nox.options.error_on_missing_interpreters = True

RESULTS = Path("docs/reference/versions.json")
WHEELS = ("--find-links", "dist/wheels", "--wheel-dir", ".nox/wheels")

# Without importing the package, which needs TensorFlow.
VERSION = runpy.run_path("keras_dist/version.py")

_VERSIONS = (
    "import json, platform, keras, tensorflow; print(json.dumps({'tensorflow': "
    "tensorflow.__version__, 'python': platform.python_version(), 'keras': "
    "keras.__version__}))"
)


def list_cases() -> list:
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
                nox.param(python, tensorflow, keras, is_corner, id=case)
                for case, keras in kerases.items()
            ]
    return cases


@nox.session
@nox.parametrize("python,tensorflow,keras,is_corner", list_cases())
def versions(
    session: nox.Session, tensorflow: str, keras: str, is_corner: bool
) -> None:
    """Try claimed versions together, and record that they have passed."""
    installed = try_versions(session, tensorflow, [keras], is_corner)
    date = f"{datetime.date.today()}"
    record = {**installed, "ranks": is_corner, "date": date}
    records = {_minors(each): each for each in json.loads(RESULTS.read_text())}
    records[_minors(record)] = record
    lines = ",\n".join(json.dumps(records[key]) for key in sorted(records))
    RESULTS.write_text(f"[\n{lines}\n]\n")


@nox.session(python="3.11")
def nightly(session: nox.Session) -> None:
    """Try TensorFlow's newest release or candidate, and last night's build of Keras."""
    keras = ["--pre", "keras-nightly"]
    try_versions(session, "tensorflow>=2.22.0rc0", keras, is_corner=True)


def try_versions(
    session: nox.Session, tensorflow: str, keras: list[str], is_corner: bool
) -> dict:
    """Install versions, and run what belongs to them; return what was installed."""
    dev = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    # Without the extra that keeps TensorFlow in the claimed range.
    tools = [each for each in dev["dev"] if not each.startswith("keras-dist[")]
    session.install(".", tensorflow, *tools)
    # A candidate of TensorFlow brings `keras-nightly`, which has the files of `keras`,
    # too: the one that is tried comes last.
    session.install("--no-deps", "--force-reinstall", *keras)
    output = session.run("python", "-c", _VERSIONS, silent=True) or ""
    session.run("keras-dist", "check", "-np", "2")  # over TensorFlow's collectives
    session.run("keras-dist", "run", "-np", "2", "examples/digits.py")
    if is_corner:
        session.run("keras-dist", "install-horovod", "--no-mpi", "--no-nccl", *WHEELS)
        session.run("keras-dist", "check", "-np", "2")
        tests = ["tests/test_private.py", "tests/test_ranks.py"]
        session.run("python", "-m", "pytest", "-q", "-k", "private or 2-", *tests)
    return json.loads(output.splitlines()[-1])


def _minors(record: dict) -> tuple:
    names = ("tensorflow", "python", "keras")
    return tuple(VERSION["parse_version"](record[name]) for name in names)
