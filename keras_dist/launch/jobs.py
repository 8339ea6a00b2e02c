"""A job: its ranks, once or again after a failure."""

import contextlib
import secrets
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from keras_dist.launch import processes
from keras_dist.launch.failures import explain, tell
from keras_dist.launch.ranks import Command, Ranks
from keras_dist.launch.rendezvous import rendezvous, slots

# With which the ranks sign what they send each other.
SECRET = "KERAS_DIST_SECRET"

# The number of the restart, from 1; not there in the first run.
RESTART = "KERAS_DIST_RESTART"

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(command: Command, *, num_ranks: int, restarts: int = 0) -> int:
    """Run a command on ranks of this host, and end all that they have started.

    Call it from the main thread of a process of its own: it takes over its signals.

    Args:
        command: What every rank runs.
        num_ranks: How many.
        restarts: How often to start again after a failure.

    Returns:
        The exit code: 0, that of the rank that failed first, or 128 + the number of
        the signal that stopped the job.

    Raises:
        RuntimeError: If Horovod is not installed.
        ValueError: If a number is too small.
    """
    if num_ranks < 1 or restarts < 0:
        raise ValueError(
            "At least one rank is needed, and no negative number of restarts. "
            f"Received: -np {num_ranks} --restarts {restarts}"
        )
    job = secrets.token_hex(8)
    # Before the first thread, since it forks.
    with processes.warden(job), _stopped_by_signals() as stopped:
        for restart in range(restarts + 1):
            code = _run_once(command, num_ranks, job, restart, stopped)
            if stopped:
                return 128 + stopped[0]
            if code == 0 or restart == restarts:
                return code
            tell(f"keras-dist: start {restart + 2} of at most {restarts + 1}.")
    return code


def _run_once(
    command: Command, num_ranks: int, job: str, restart: int, stopped: list[int]
) -> int:
    secret = secrets.token_hex(16)
    places = slots(num_ranks)
    with rendezvous(places, secret) as found:
        environment = {**command.environment, **found, SECRET: secret}
        if restart:
            environment[RESTART] = str(restart)
        ranks = Ranks(
            Command(command.kind, command.words, environment, command.log_dir),
            places,
            job,
        )
        failures, said = [], ""
        try:
            ranks.start()
            failures = ranks.wait(stopped)
            if failures and not stopped:
                said = explain(failures, ranks.where(), num_ranks=num_ranks)
        finally:
            ranks.end(is_urgent=False)
        if said:
            tell(said)
            return failures[0].code
    return 0


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[list[int]]:
    """A list that gets the number of each signal that wants to stop the job."""
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if len(stopped) == 1:
            sys.stderr.write(f"\nkeras-dist: {signal.Signals(number).name}: ending.\n")

    before = {number: signal.signal(number, stop) for number in _STOPS}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
