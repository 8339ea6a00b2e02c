"""A thread in each rank that ends the job if no rank makes progress, and says why.

Ranks write their heartbeats to the store of the job, and why one of them has ended.

CPU time and bytes are read for each thread (Linux), since Horovod's threads, which poll
all the time, do not count; `psutil` has bytes for whole processes alone.
"""

import atexit
import contextlib
import json
import math
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from keras_dist.launch.hosts import ranks_in_words
from keras_dist.launch.monitor import rank_process, record
from keras_dist.launch.store import MANY, find_store
from keras_dist.launch.time_limits import STALL, TimeLimits
from keras_dist.lines import is_users

# The exit code of a rank that ends the job: EX_SOFTWARE of sysexits.h. (75 is the exit
# code of a rank that was asked to end and has saved a checkpoint.)
EXIT_CODE = 70

# Names in the store, beside the heartbeats, whose names are the numbers of the ranks:
# what the first rank to find a stall has found, and why a rank has ended.
_STALLED, _ENDED = "stalled", "ended"

# Seconds for which the rank with the store stays, so that others read why it has ended.
_READ_SECONDS = 1.0

# The file in which torchrun looks for the error of a process.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# In the line about ranks for which the others wait.
_MISSING = "missing"

# Another rank counts as idle after this fraction of the limit, since the last progress
# of all may have been noticed a little later there.
_ALMOST = 0.8

# A rank does not answer after this fraction of the limit without a new heartbeat.
_SILENT = 0.4

_TICKS = os.sysconf("SC_CLK_TCK")

# For each thread: CPU time in seconds, and bytes read and written.
Usage = dict[int, tuple[float, int]]

# A process that waits still uses a little CPU time and reads a few bytes, in threads
# that wake up to poll. Up to these limits it counts as idle. They are so low that a
# process which works is above them even if many processes share the core.
_IDLE_FRACTION = 0.02
_IDLE_SECONDS = 0.05
_IDLE_BYTES, _IDLE_RATE = 2**20, 50e3

# The file that runs the user's script under `keras-dist run`; and the one in which
# Python waits for TensorFlow.
_LAUNCHED_FILE = "keras_dist/launch/monitor/rank_process.py"
_WAITING_FILE = "tensorflow/python/eager/execute.py"


class Watchdog(threading.Thread):
    """A thread that checks this rank, and all other ranks while this one is idle.

    A rank makes progress if its record changes, or it computes, reads or writes; and
    while it waits for somebody to read what it prints (`| less`, Ctrl-S).

    Args:
        rank, size: Rank of this process, and number of ranks.
        limit: The job ends if no rank makes progress for this many seconds.
        ignored_threads: Ids of Horovod's threads, which poll all the time.
    """

    def __init__(
        self, *, rank: int, size: int, limit: float, ignored_threads: Collection[int]
    ) -> None:
        super().__init__(name="keras_dist.monitor", daemon=True)
        self._rank, self._size, self._limit = rank, size, limit
        alone = TimeLimits().first_rank
        self._alone_limit = max(limit, alone or float("inf"))
        self._ignored_threads = set(ignored_threads)
        # In which the ranks keep their heartbeats; with `None` each rank knows only
        # about itself.
        self._store = find_store()
        self._tick = min(max(limit / 12, 0.2), 5.0)
        self.is_over = threading.Event()  # this process is about to exit
        self._beats = 0
        # For each other rank: its last heartbeat, and when that was first seen.
        self._seen: dict[int, tuple[int, float]] = {}
        # When this rank last made progress; what it has used by now, and since then;
        # how often its record has changed, and whether others wait for what it does.
        self._last_progress = time.monotonic()
        self._usage = read_usage(ignored_threads=ignored_threads)
        self._seconds, self._bytes, self._state = 0.0, 0, (-1, False)

    def run(self) -> None:
        self._ignored_threads.add(threading.get_native_id())
        before = time.monotonic()
        while not self.is_over.wait(self._tick):
            now = time.monotonic()
            # The process or the whole machine was suspended in the meantime.
            if now - before > 4 * self._tick + 2:
                self._last_progress += now - before
            before = now
            self._note_progress(now)
            own = self.publish(now - self._last_progress)
            if (rank_lines := self._find_stall(own, now)) is not None:
                self._end(own, rank_lines)

    def _note_progress(self, now: float) -> None:
        usage = read_usage(ignored_threads=self._ignored_threads)
        for thread, (seconds, size) in usage.items():
            before = self._usage.get(thread, (0.0, 0))
            self._seconds += max(0.0, seconds - before[0])
            self._bytes += max(0, size - before[1])
        self._usage = usage
        elapsed = now - self._last_progress
        # What ends a block of one rank alone is progress: its time was under its limit.
        state = record.here.position.changes, record.here.is_alone
        is_work = self._seconds > _IDLE_SECONDS + _IDLE_FRACTION * elapsed
        is_work |= self._bytes > _IDLE_BYTES + _IDLE_RATE * elapsed
        outputs = select.poll()
        for number in (1, 2):
            outputs.register(number, select.POLLOUT)
        is_full = len(outputs.poll(0)) < 2  # one that is closed is among them
        if state != self._state or is_work or is_full:
            self._last_progress, self._state = now, state
            self._seconds, self._bytes = 0.0, 0

    def publish(self, idle: float) -> dict[str, Any]:
        """Write a heartbeat to the store, and return it."""
        self._beats += 1
        position = record.here.position
        # Reading the stacks takes time, so only if this rank may be the cause.
        may_be_cause = idle > self._limit / 2 and not position.collective
        status = {
            "beat": self._beats,
            "idle": idle,
            "is_with_others": bool(position.phase or position.collective),
            "position": str(position),
            "is_alone": self._state[1],
            "code": self._find_user_code() if may_be_cause else None,
        }
        if self._store is not None:
            self._store.put(str(self._rank), status)
        return status

    def _find_stall(self, own: dict[str, Any], now: float) -> list[str] | None:
        """Return a line for each group of ranks if none makes progress.

        The first rank to find it lets the others know.
        """
        if own["idle"] < self._limit / 2:
            return None
        if self._store is None:
            # A rank that waits in a collective cannot know whether the others work. So
            # only a rank that is idle in the user's code, in a fit, ends the job.
            is_over = own["idle"] > self._choose_limit([own])
            return [] if is_over and own["is_with_others"] and own["code"] else None
        if isinstance(lines := self._store.get(_STALLED), list):
            return [str(line) for line in lines]
        statuses = self._read_statuses(now)
        known = {self._rank: own, **{k: s for k, s in statuses.items() if s}}
        limit = self._choose_limit(known.values())
        # A rank without a heartbeat has not begun.
        are_idle = len(known) == self._size and all(
            status["idle"] > _ALMOST * limit for status in known.values()
        )
        are_with_others = any(status["is_with_others"] for status in known.values())
        if own["idle"] <= limit or not are_idle or not are_with_others:
            return None
        lines = self._describe(known)
        self._store.put(_STALLED, lines)
        return lines

    def _choose_limit(self, statuses: Collection[Mapping[str, Any]]) -> float:
        """Return the limit for ranks of which one may run what the others wait for."""
        is_alone = any(status["is_alone"] for status in statuses)
        return self._alone_limit if is_alone else self._limit

    def _read_statuses(self, now: float) -> dict[int, dict[str, Any] | None]:
        """Return the heartbeat of each other rank; by one request where possible.

        One that is silent is suspended, or has ended: it is idle for ever.
        """
        assert self._store is not None
        found, statuses = self._store.get_all(""), {}
        for rank in set(range(self._size)) - {self._rank}:
            name = str(rank)
            value = self._store.get(name) if found is None else found.get(name)
            status = value if _is_status(value) else None
            beat = status["beat"] if status else 0
            if beat != self._seen.get(rank, (-1, now))[0]:
                self._seen[rank] = beat, now
            if status and now - self._seen[rank][1] > _SILENT * self._limit:
                status |= {"idle": math.inf, "is_alone": False}
            statuses[rank] = status
        return statuses

    def _describe(self, statuses: Mapping[int, dict[str, Any]]) -> list[str]:
        """Return a line for each missing rank, and for each position of the waiting."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, status in sorted(statuses.items()):
            group = "Waiting", status["position"]
            if status["idle"] == math.inf:
                group = _MISSING, "it does not respond"
            elif status["code"]:
                group = _MISSING, f"{status['position']}, {status['code']}"
            groups.setdefault(group, []).append(rank)
        # The missing first.
        lines = []
        for (kind, text), ranks in sorted(groups.items(), reverse=True):
            named, verb = ranks_in_words(ranks), "is" if len(ranks) == 1 else "are"
            is_missing = kind == _MISSING
            line = f"{named.capitalize()} {verb} missing: {text}."
            lines.append(line if is_missing else f"{kind} {text}: {named}.")
        return lines

    def _end(self, own: dict[str, Any], rank_lines: list[str]) -> None:
        """Print where every rank is and the stacks of this one, and exit."""
        limit, variable = self._limit, STALL
        if own["idle"] > self._alone_limit:
            limit, variable = self._alone_limit, "KERAS_DIST_FIRST_RANK_SECONDS"
        message = f"no rank has made progress for {limit:g} s"
        head = [
            f"keras_dist: {message}, and the job ends. Rank {self._rank} is "
            f"{own['position']}: {own['code'] or 'it waits there'}.",
            *rank_lines,
        ]
        advice = (
            "If the ranks were working, raise the limit: "
            f"{variable}={5 * limit:g}, or 0 for no limit."
        )
        printed = "\n".join([*head, self._format_stacks(), advice, ""])
        os.write(2, printed.encode(errors="replace"))
        # A rank that is in the user's code while others wait for it is the cause.
        is_secondary = not own["code"] and any(_MISSING in line for line in rank_lines)
        rank_process.write_report(
            f"Stalled: {message}",
            "\n".join([*head, advice]),  # the stacks stand above
            EXIT_CODE,
            is_secondary=is_secondary,
        )
        sys.stdout.flush()
        time.sleep(2 * self._tick + 1)  # until the other ranks have printed, too
        os._exit(EXIT_CODE)

    def _list_stacks(self) -> Iterator[tuple[int, traceback.StackSummary]]:
        """Ids and stacks of all threads but this one, that of the training first."""
        frames = sys._current_frames()
        for thread in sorted(frames, key=lambda thread: thread != record.here.thread):
            if thread != self.ident:
                yield thread, traceback.extract_stack(frames[thread])

    def _format_stacks(self) -> str:
        """Return the stacks of all Python threads, that of the training first."""
        names = {each.ident: f"thread {each.name}" for each in threading.enumerate()}
        names[threading.main_thread().ident] = "the main thread"
        texts = []
        for thread, stack in self._list_stacks():
            entries = [e for e in stack if not e.filename.endswith(_LAUNCHED_FILE)]
            lines = "".join(traceback.format_list(entries))
            name = names.get(thread, f"thread {thread}")
            texts.append(f"Stack of {name} (most recent call last):\n{lines}")
        return "\n".join(texts)

    def _find_user_code(self) -> str | None:
        """Return the line of the user's code that runs now; `None` if TensorFlow runs.

        Two kinds of threads can run the user's code: the one that trains, and those in
        which TensorFlow calls the user's generator or `py_function` while it waits for
        the step.
        """
        for thread, stack in self._list_stacks():
            files = [entry.filename for entry in stack]
            is_py_function = any(file.endswith("ops/script_ops.py") for file in files)
            is_candidate = thread == record.here.thread or is_py_function
            if not is_candidate or files[-1].endswith(_WAITING_FILE):
                continue
            for each in reversed(stack):
                if is_users(each.filename):
                    return f"{each.filename}, line {each.lineno}, in {each.name}"
        return None


def _is_status(value: Any) -> bool:
    """Return True if a value has the form of what `publish` writes."""
    kinds: dict[str, Any] = {"beat": int, "idle": int | float, "position": str}
    kinds |= {"is_with_others": bool, "is_alone": bool, "code": str | None}
    return isinstance(value, dict) and all(
        isinstance(value.get(name, ...), kind) for name, kind in kinds.items()
    )


def threads(pid: int | None = None) -> set[int]:
    """Ids of all threads of a process, by default of this one; Linux only."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/task")}
    except OSError:
        return set()


def read_usage(pid: int | None = None, ignored_threads: Collection[int] = ()) -> Usage:
    """CPU time and bytes of a process, by default this one, and its children so far."""
    usage: Usage = {}
    for thread in threads(pid) - set(ignored_threads):
        folder = Path(f"/proc/{pid or 'self'}/task/{thread}")
        # The name in parentheses may contain spaces: split only what follows it.
        fields = _read(folder / "stat").rpartition(")")[2].split()
        if not fields:  # the thread has just ended
            continue
        io = _read(folder / "io").split()  # rchar: …, wchar: …
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        usage[thread] = seconds, int(io[1]) + int(io[3]) if io else 0
        for child in _read(folder / "children").split():
            usage |= read_usage(int(child))
    return usage


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def start(*, rank: int, size: int, ignored_threads: Collection[int]) -> None:
    """Watch this rank and note what ends it, if there are others; see `Watchdog`."""
    if size == 1:
        return
    note_end(rank)
    limit = TimeLimits().stall
    if limit:
        watchdog = Watchdog(
            rank=rank, size=size, limit=limit, ignored_threads=ignored_threads
        )
        # At once, before anything can happen to this rank: the others do not count a
        # rank as idle before its first heartbeat.
        watchdog.publish(0.0)
        watchdog.start()
        atexit.register(watchdog.is_over.set)


def note_end(rank: int) -> None:
    """Let the other ranks, and torchrun, know what will end this rank.

    It is an error, or an exit inside of a fit.
    """
    store, print_error, errors = find_store(), sys.excepthook, list[BaseException]()

    def write(text: str) -> None:
        # Unless another rank was the first to end.
        if store is not None and store.get(_ENDED) is None:
            note = f"Rank {rank} on {socket.gethostname()} {text}."
            store.put(_ENDED, note, attempts=MANY)

    def note_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        errors.append(error)
        if not rank_process.is_secondary(error):
            write("has failed; its traceback is the cause")
        if path := os.environ.get(_ERROR_FILE):
            lines = traceback.format_exception(kind, error, trace)
            more = {"py_callstack": "".join(lines), "timestamp": f"{time.time():.0f}"}
            message = {"message": f"{kind.__name__}: {error}", "extraInfo": more}
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps({"message": message}))
        print_error(kind, error, trace)

    def note_exit() -> None:
        if not errors and (text := record.here.position.describe_exit()):
            write(text)

    sys.excepthook = note_error
    # Before Horovod, which was started earlier, ends the others' collectives.
    atexit.register(note_exit)


def describe_ended_rank() -> str:
    """Return why a collective has ended early: by which rank, if that is known."""
    note = (store := find_store()) and store.get(_ENDED)
    note = note or "Its own error, printed by that rank, is the cause."
    return f"Another rank has ended while this one waited for it. {note}"


def stay_for_readers() -> None:
    """Wait until others have read the note of this rank, which has the store."""
    if (store := find_store()) and store.get(_ENDED):
        time.sleep(_READ_SECONDS)
