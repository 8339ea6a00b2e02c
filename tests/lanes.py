"""The lanes of `make test`; marks of xdist's own do not reach pytest 9.2."""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# In the order in which they begin. xdist gives a worker that has at most two tests left
# the next lane. The first lane has one test, so its worker is given the third one at
# once, and runs it last: it is a short one.
_FIRST = ("2 ranks", "hosts", "1 ranks", "pages", "3 ranks")


class Lanes(LoadScopeScheduling):
    """Sends all tests of a lane to one worker, and begins with the longest lanes."""

    def _split_scope(self, nodeid: str) -> str:
        """The lane of a test, by its id: one worker runs all of a lane, one by one.

        "1 ranks", "2 ranks" and "3 ranks" are the launches of `ranks/`; "hosts" has
        what starts hosts and launchers, of which some have the same ports each time;
        "pages" has what runs the documentation. Every other file is a lane of its own,
        for whichever worker is free.
        """
        file = nodeid.partition("::")[0]
        if "test_ranks.py" in file:
            return f"{nodeid.partition('[')[2][0]} ranks"
        if "tests/launch/" in file or "tests/hosts/" in file:
            return "hosts"
        is_page = file.endswith(("test_docs.py", "test_examples.py"))
        return "pages" if is_page else file

    def _assign_work_unit(self, node: Any) -> None:
        for lane in reversed(_FIRST):
            if lane in self.workqueue:
                self.workqueue.move_to_end(lane, last=False)
        super()._assign_work_unit(node)
