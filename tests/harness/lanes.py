"""The lanes of `make test`; marks of xdist's own do not reach pytest 9.2."""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from harness.rank_tests import lane_of

# In the order in which they begin: the longest ones.
_FIRST = ("np2 0", "np2 1", "np2 2", "np3 0", "np3 1", "hosts", "pages")


class Lanes(LoadScopeScheduling):
    """Sends all tests of a lane to one worker, and begins with the longest lanes."""

    def _split_scope(self, nodeid: str) -> str:
        """The lane of a test, by its id: one worker runs all of a lane, one by one.

        Each launch of `ranks/` is one; "hosts" has what starts hosts and launchers, of
        which some have the same ports each time; "pages" has what runs the
        documentation. Every other file is a lane of its own, for whichever worker is
        free.
        """
        if lane := lane_of(nodeid):
            return lane
        file = nodeid.partition("::")[0]
        if "tests/launch/" in file or "tests/hosts/" in file:
            return "hosts"
        is_page = file.endswith(("test_docs.py", "test_examples.py"))
        return "pages" if is_page else file

    def _assign_work_unit(self, node: Any) -> None:
        for lane in reversed(_FIRST):
            if lane in self.workqueue:
                self.workqueue.move_to_end(lane, last=False)
        super()._assign_work_unit(node)
