"""Distinguish a process that works from one that only waits."""

from collections.abc import Collection

from keras_dist.launch.monitor import record, usage

# A process that waits still uses a little CPU time and reads a few bytes, in threads
# that wake up to poll. Up to these limits it counts as idle. They are so low that a
# process which works is above them even if many processes share the core.
_IDLE_FRACTION = 0.02
_IDLE_SECONDS = 0.05
_IDLE_BYTES, _IDLE_RATE = 2**20, 50e3


class Progress:
    """How long this rank has made no progress.

    Progress is: the record has changed, or the process has computed, read or written.

    Args:
        ignored_threads: Ids of threads whose work does not count.
        now: The time, as of `time.monotonic`.
    """

    def __init__(self, ignored_threads: Collection[int], now: float) -> None:
        self._ignored_threads = ignored_threads
        self._last = now
        self._usage = usage.used(ignored_threads=ignored_threads)
        self._sum = (0.0, 0)
        self._changes = -1

    def idle(self, now: float) -> float:
        """Seconds without progress; must be called at short intervals."""
        usage_now = usage.used(ignored_threads=self._ignored_threads)
        seconds, size = usage.growth(self._usage, usage_now)
        self._usage = usage_now
        self._sum = self._sum[0] + seconds, self._sum[1] + size
        changes = record.here.position.changes
        if changes != self._changes or is_work(self._sum, now - self._last):
            self._last, self._changes, self._sum = now, changes, (0.0, 0)
        return now - self._last

    def skip(self, seconds: float) -> None:
        """Do not count a time in which this process was suspended."""
        self._last += seconds


def is_work(used: tuple[float, int], elapsed: float) -> bool:
    """Whether a process has worked, or has only polled while it waited.

    Args:
        used: CPU time in seconds, and bytes read and written.
        elapsed: Seconds in which it has used them.

    >>> is_work((0.2, 0), 60.0), is_work((6.0, 0), 60.0), is_work((0.0, 2**21), 9.0)
    (False, True, True)
    """
    is_computing = used[0] > _IDLE_SECONDS + _IDLE_FRACTION * elapsed
    return is_computing or used[1] > _IDLE_BYTES + _IDLE_RATE * elapsed
