"""Processes that have imported what ranks import, and wait to be one.

With `--spare` they are there at all times; else while another start is near, because a
host of a job whose hosts come and go does not answer.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from keras_dist.launch.monitor import rank_process

# Seconds after the start of the ranks: until then they need the cores themselves.
FILL_SECONDS = 20.0

# Bytes that are free for each process before it is started without `--spare`. One that
# has imported TensorFlow and Keras takes less than half of it.
_ROOM = 1 << 30


class Spares:
    """The spare processes of a host, from one start of its ranks to the next.

    None of them takes part in anything: they have no GPU, and no connection to others.

    Args:
        is_lasting: Whether they are there at all times, not only while a start is near.
    """

    def __init__(self, *, is_lasting: bool = True) -> None:
        self._is_lasting = is_lasting
        self._idle: list[subprocess.Popen[bytes]] = []
        # Whether the ranks will probably start again soon; other threads may set it.
        self.is_start_near = False

    @property
    def pids(self) -> Collection[int]:
        """Ids of those that wait."""
        return [process.pid for process in self._idle]

    def keep(self, count: int, environment: Mapping[str, str], seconds: float) -> None:
        """Start those that are missing, or end those that nobody needs any more.

        Call it repeatedly while ranks run, from a thread that stays.

        Args:
            count: How many there are to be.
            environment: All variables of their environment for now.
            seconds: Seconds since the start of the ranks.
        """
        if self._is_lasting and (self.is_start_near or seconds > FILL_SECONDS):
            self.fill(count, environment)
        elif not self._is_lasting and self.is_start_near:
            if _free() > (count - len(self._idle)) * _ROOM:
                self.fill(count, environment)
        elif not self._is_lasting:
            self.end()

    def end(self) -> None:
        """End those that wait."""
        for process in self._idle:
            process.kill()
            process.communicate()
        self._idle = []

    def fill(self, count: int, environment: Mapping[str, str]) -> None:
        """Start so many as are missing; from a thread that stays.

        Args:
            count: How many there are to be.
            environment: All variables of their environment for now.
        """
        self._idle = [process for process in self._idle if process.poll() is None]
        while len(self._idle) < count:
            self._idle.append(popen(rank_process.SPARE, [], environment))

    def take(
        self, kind: str, words: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """Let one of them become a rank; `None` if there is none.

        Args:
            kind: Kind of the command; see `Command`.
            words: Its words.
            environment: All variables of its environment from now on.
        """
        order = {"kind": kind, "words": list(words), "environment": {**environment}}
        while self._idle:
            process = self._idle.pop(0)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.close()
                return process
            process.kill()
            process.wait()
        return None


def popen(
    kind: str, words: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the process of a rank, or a spare one, which gets its order by a pipe."""
    runner = [sys.executable, rank_process.__file__, str(os.getpid()), kind]
    is_spare = kind == rank_process.SPARE
    return subprocess.Popen(
        [*runner, *words],
        env=environment,
        stdin=subprocess.PIPE if is_spare else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl-C reaches only the launcher
    )


def _free() -> int:
    """Bytes of memory that this host can still give, or the container."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [line for line in meminfo if line.startswith("MemAvailable")]
    free = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # it has no limit: "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free
