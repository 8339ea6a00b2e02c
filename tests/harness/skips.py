"""Where a test is skipped for a reason that nobody expected, the run has failed.

In CI the variable EXPECTED_SKIPS is a pattern of reasons; without it any is allowed.
"""

import os
import re

import pytest


class Skips:
    """Plugin that looks at the reason of each skipped test and file.

    Args:
        expected: A regular expression for all that may be skipped.
    """

    def __init__(self, expected: str) -> None:
        self._expected, self._found = re.compile(expected), dict[str, str]()

    def pytest_runtest_logreport(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> None:
        """Note the reason."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2]
            if not self._expected.search(reason):
                self._found[report.nodeid] = reason

    pytest_collectreport = pytest_runtest_logreport  # of a whole file

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail."""
        if self._found and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Print what was not expected."""
        for nodeid, reason in self._found.items():
            terminalreporter.write_line(f"skipped, not expected: {nodeid} {reason}")


def register(config: pytest.Config) -> None:
    """Register the plugin in the process that reports, if the variable is set."""
    if (expected := os.environ.get("EXPECTED_SKIPS")) is not None:
        config.pluginmanager.register(Skips(expected))
