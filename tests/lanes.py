"""The two lanes of `make test`; marks of xdist's own do not reach pytest 9.2."""

from xdist.scheduler import LoadScopeScheduling


def lane_of(test: str) -> str:
    """The lane of a test, by its id.

    One has the launches of `ranks/` on two and three ranks, the other one all else.
    Within a lane one test runs at a time: a SLURM of the tests, say, has the same ports
    each time.
    """
    is_launch = "test_ranks.py" in test and "[1-" not in test
    return "ranks" if is_launch else "others"


class Lanes(LoadScopeScheduling):
    """Sends all tests of a lane to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)
