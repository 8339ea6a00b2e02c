"""Tests of `ranks/`: collected in one process, run by ranks, reported one by one.

Where pytest runs in an ordinary process, each test is collected once for each group of
ranks that is to run it, as `test_x[np2]`. The first test of a part starts the ranks,
each of which runs pytest with all tests of that part, and writes its reports to a file;
the process that has started them reads these, and reports each test once.
"""

import json
import os
import re
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.launching import HOROVOD, command_of, end, start

RANKS = Path(__file__).parents[1] / "ranks"
FILES = sorted(file.name for file in RANKS.glob("test_*.py"))

# Seconds in which some rank must end a test. The first one also waits for the import
# of TensorFlow, and for what plain Keras trains for all tests of its file.
LIMIT = 900

# After so many launches in a row that ended in their first test, no other is started.
_MOST_FAILED = 3

# A folder into which ranks write their reports; with it, they run the tests listed in
# it, in that order.
_FOLDER = "KERAS_DIST_RANK_TESTS"


@dataclass(frozen=True)
class Group:
    """Ranks that run the same tests together.

    Args:
        size: How many they are.
        launcher: What starts their first part; `keras-dist run` starts the others: it
            imports no TensorFlow itself.
        transport: As of `KERAS_DIST_TRANSPORT`; "" for Horovod where it is installed.
        parts: A process gets slower with each test, since TensorFlow keeps their
            functions: so many launches share the files.
        quick: Files that this group runs without LONG_TESTS=1; `None` for all.
    """

    size: int
    launcher: str = "keras-dist"
    transport: str = ""
    parts: int = 1
    quick: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """Its name in the id of a test."""
        return f"np{self.size}{self.transport and '_' + self.transport}"


# With two ranks alone, many mistakes in order and divisibility cancel out. Transports
# may differ in all collectives, and in errors of one rank.
_LINKS = "test_comm.py", "test_transport.py", "test_one_rank_fails.py"
GROUPS = (
    Group(1, quick=("test_equivalence.py",)),
    Group(2, "horovodrun", parts=3),
    Group(3, parts=2),
    Group(2, transport="tensorflow", parts=3, quick=()),
    Group(3, transport="tensorflow", parts=3, quick=_LINKS),
)


# Marks of tests that need not run on every number of ranks.
MARKS = (
    "several_ranks: one rank is plain Keras",
    "three_ranks: an odd number may matter",
    "slow_on_three: there, with LONG_TESTS=1 alone",
    "two_ranks: slow, and the same on any number",
    "over_horovod: its threads, memory and names",
)


def is_rank() -> bool:
    """Return True if this process is a rank."""
    return "HOROVOD_SIZE" in os.environ


def groups() -> tuple[Group, ...]:
    """Return the groups of which this process runs tests: in a rank, its own alone."""
    if not is_rank():
        return GROUPS
    transport = os.environ.get("KERAS_DIST_TRANSPORT", "")
    return (Group(int(os.environ["HOROVOD_SIZE"]), transport=transport),)


def group_of(item: pytest.Item) -> Group | None:
    """Return the group that runs a test; `None` if no ranks do."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("group") if callspec else None


def lane_of(nodeid: str) -> str | None:
    """Return the name of the launch that runs a test; `None` if none does."""
    match = re.search(r"ranks/(\w+\.py)::.*?\[(np\w+)", nodeid)
    if match is None:
        return None
    group = next(group for group in GROUPS if str(group) == match[2])
    number = FILES.index(match[1]) if match[1] in FILES else 0
    return f"{group} {number % group.parts}"


def is_left_out(item: pytest.Item, group: Group) -> bool:
    """Return True for a test that compares Keras with itself, or repeats another one.

    A test runs on one number of ranks: on three where the number may matter, else on
    two, which are faster on two cores. One rank runs those where it may matter, too:
    the tests of one file, and with LONG_TESTS=1 all. That runs them on every number.
    """
    marks = {mark.name for mark in item.iter_markers()}
    size, is_long = group.size, "LONG_TESTS" in os.environ
    if not is_long and group.quick is not None and item.path.name not in group.quick:
        return True
    is_own = group.transport == "tensorflow" or find_spec("horovod") is None
    if is_own and "over_horovod" in marks:
        return True
    if "two_ranks" in marks and size != 2:
        return True
    if size == 1:
        return "several_ranks" in marks or not (is_long or "three_ranks" in marks)
    is_quick = is_long or "slow_on_three" not in marks
    is_for_three = "three_ranks" in marks and is_quick
    if size == 2:
        return is_for_three and not (is_long or "two_ranks" in marks)
    return not is_for_three


class Launch:
    """One launch of ranks that run tests.

    Args:
        items: The tests, in their order.
        group: The ranks.
        launcher: What starts them.
        folder: An empty folder of its own.
    """

    def __init__(
        self, items: list[pytest.Item], group: Group, launcher: str, folder: Path
    ) -> None:
        self.group, self.is_over = group, False
        (folder / "tests").write_text("\n".join(item.nodeid for item in items))
        env = {_FOLDER: str(folder)}
        if group.transport:
            env["KERAS_DIST_TRANSPORT"] = group.transport
        files = dict.fromkeys(item.path for item in items)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command = command_of([*words, *files], group.size, launcher)
        self._output = folder / "output"
        self._process = start(
            command,
            env={**HOROVOD, **env},
            start_new_session=True,
            stdout=self._output.open("w"),
            stderr=-2,
        )
        self._files = [folder / f"{rank}" for rank in range(group.size)]
        for file in self._files:
            file.touch()
        self._readers = [file.open() for file in self._files]
        self._lines = [""] * group.size
        self._reports: dict[str, list[list[dict]]] = {}
        self._last = time.monotonic()

    def wait_for(self, nodeid: str, is_last: bool) -> tuple[list[list[dict]], str]:
        """Wait until all ranks have ended a test, or one has failed.

        Returns:
            The reports of each rank, and why some are missing.
        """
        why = ""
        while True:
            has_ended = self._process.poll() is not None
            self._read()
            reports = self._reports.setdefault(nodeid, [[] for _ in self._files])
            has_failed = any(each["outcome"] == "failed" for r in reports for each in r)
            if has_failed or has_ended or all(map(_is_complete, reports)):
                break
            if time.monotonic() - self._last > LIMIT:
                why = f"No rank has ended a test for {LIMIT} s.\n"
                self.stop()
                break
            time.sleep(0.05)
        is_complete = all(map(_is_complete, reports))
        # The ranks have ended well: this test is none of theirs, and the others ran.
        is_missing = not is_complete and self._process.poll() == 0
        self.is_over = is_last or has_failed or not (is_complete or is_missing)
        if self.is_over or is_missing:
            code = self._wait()
            self._read()
            missing = [r for r, done in enumerate(reports) if not _is_complete(done)]
            if missing:
                why += f"Without a result of rank {', '.join(map(str, missing))}. "
            if not has_failed and (code or missing):
                text = self._output.read_text(errors="replace")
                why += f"The launcher ended with exit code {code}.\n{text[-20_000:]}"
        return reports, why

    def stop(self) -> None:
        """End all ranks; those that hang print where."""
        if self._process.poll() is None:
            end(self._process)

    def _wait(self) -> int:
        begin = time.monotonic()
        while self._process.poll() is None and time.monotonic() - begin < LIMIT / 10:
            time.sleep(0.05)
        self.stop()
        return self._process.returncode

    def _read(self) -> None:
        for rank, reader in enumerate(self._readers):
            lines = (self._lines[rank] + reader.read()).split("\n")
            self._lines[rank] = lines.pop()
            for line in lines:
                report = json.loads(line)
                empty: list[list[dict]] = [[] for _ in self._readers]
                self._reports.setdefault(report["nodeid"], empty)[rank].append(report)
                self._last = time.monotonic()


def _is_complete(reports: list[dict]) -> bool:
    return any(report["when"] == "teardown" for report in reports)


class Starter:
    """Plugin of the process that starts ranks, and reports their tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._waiting: dict[str, list[pytest.Item]] = {}
        self._launches: dict[str, Launch] = {}
        self._failed: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Divide the tests among launches."""
        for item in session.items:
            if lane := lane_of(item.nodeid):
                self._waiting.setdefault(lane, []).append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Report a test that ranks run."""
        lane = lane_of(item.nodeid)
        if lane is None:
            return None
        log = item.ihook
        log.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._result(item, lane):
            log.pytest_runtest_logreport(report=report)
        log.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the ranks whose tests nobody waits for."""
        for launch in self._launches.values():
            launch.stop()

    def _result(self, item: pytest.Item, lane: str) -> list[pytest.TestReport]:
        waiting = self._waiting[lane]
        if self._failed[lane] == _MOST_FAILED:
            why = f"{_MOST_FAILED} launches have failed in their first test."
            return [_failure(item, f"Not run: {why}")]
        launch = self._launches.get(lane)
        if is_first := launch is None or launch.is_over:
            group = group_of(item)
            assert group is not None
            del waiting[: waiting.index(item)]
            folder = self._config._tmp_path_factory.mktemp("launch")
            launcher = group.launcher if lane.endswith(" 0") else "keras-dist"
            launch = Launch(waiting, group, launcher, folder)
            self._launches[lane] = launch
        reports, why = launch.wait_for(item.nodeid, item is waiting[-1])
        merged = self._merge(item, reports, why)
        has_failed = any(report.failed for report in merged)
        self._failed[lane] = self._failed[lane] + 1 if has_failed and is_first else 0
        return merged

    def _merge(
        self, item: pytest.Item, by_rank: list[list[dict]], why: str
    ) -> list[pytest.TestReport]:
        """Return one report for each phase: of the rank that failed first, if one did.

        The others may have failed since they could not meet it.
        """
        merged = []
        for when in ("setup", "call", "teardown"):
            found = {
                rank: self._config.hook.pytest_report_from_serializable(
                    config=self._config, data=data
                )
                for rank, reports in enumerate(by_rank)
                for data in reports
                if data["when"] == when
            }
            failed = {rank: each for rank, each in found.items() if each.failed}
            if not found:
                continue
            if failed:
                first = min(failed, key=lambda rank: failed[rank].stop)
                report = failed[first]
                for rank, other in failed.items():
                    text = f"on {len(by_rank)} ranks, before all others"
                    text = other.longreprtext if rank != first else text
                    report.sections.append((f"rank {rank} failed", text))
                if why:
                    report.sections.append(("launch", why))
            else:
                order = sorted(found, key=lambda rank: (not found[rank].skipped, rank))
                report = found[order[0]]
            if report.skipped and isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # JSON has no tuples
            report.duration = max(each.duration for each in found.values())
            merged.append(report)
        if why and not any(report.failed for report in merged):
            merged = [*merged[:-1], _failure(item, why)]
        return merged


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, "failed", text, "call"
    )


class Reporter:
    """Plugin of a rank: runs the tests that are listed for it, and writes reports.

    Args:
        config: Of pytest.
        folder: The folder that `Launch` has made.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config, self._tests = config, (folder / "tests").read_text().split("\n")
        self._file = (folder / os.environ["HOROVOD_RANK"]).open("a")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are listed, but for those of a file with an error."""
        found = {item.nodeid: item for item in items}
        items[:] = [found[nodeid] for nodeid in self._tests if nodeid in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what has been reported here."""
        data = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        # A test on a full disk may have left a limit, which its fixture ends later.
        limit, largest = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        print(json.dumps(data, default=str), file=self._file, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, largest))


class Selection:
    """Plugin of both: which groups run which tests."""

    @pytest.hookimpl(tryfirst=True)  # ids have one order, wherever it is registered
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test of `ranks/` a group, of which `is_left_out` drops some."""
        if metafunc.definition.path.parent == RANKS:
            metafunc.fixturenames.insert(0, "group")
            metafunc.parametrize("group", groups(), ids=str, scope="session")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect what a group does not run."""
        kept, out = [], []
        for item in items:
            group = group_of(item)
            (out if group and is_left_out(item, group) else kept).append(item)
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = kept


def register(config: pytest.Config) -> None:
    """Register the plugins that this process needs."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Selection())
    if not is_rank():
        config.pluginmanager.register(Starter(config))
    elif folder := os.environ.pop(_FOLDER, None):  # no rank of a test is one of these
        config.pluginmanager.register(Reporter(config, Path(folder)))
