"""The job on this machine alone: its ranks are run by the launcher's own process."""

import contextlib
import secrets
from collections.abc import Mapping, Sequence

from keras_dist.launch import processes
from keras_dist.launch.coordinator import Hosts, Plan, Seen, run_job
from keras_dist.launch.hosts import LOOPBACK, Member, Slot
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import Assignment, Command, run_ranks, seed_of
from keras_dist.launch.store import Store, secret_of_start
from keras_dist.version import __version__


def run_locally(command: Command, num_ranks: int, *, restarts: int) -> int:
    """Run a command on all ranks, and end every process that they have started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        num_ranks: Number of ranks.
        restarts: The largest number of restarts after failures.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 + the number of
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
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals() as stopped:
        host = LocalHost(command, num_ranks, job, stopped)
        with contextlib.closing(host.store):
            plan = Plan(num_hosts=1, restarts=restarts, is_announced=True)
            return run_job(host, plan).code


class LocalHost(Hosts):
    """This machine as the only host of a job.

    Args:
        command: The command that every rank runs.
        num_ranks: Number of ranks.
        job: Id of the job.
        stopped: Numbers of the signals that this process has received.
    """

    is_local = True

    def __init__(
        self, command: Command, num_ranks: int, job: str, stopped: list[int]
    ) -> None:
        self._command, self._job, self._stopped = command, job, stopped
        self._host = Member("localhost", num_ranks, 0, 1, __version__)
        self._secret = secrets.token_hex(16)
        self.store = Store()

    def wait(self) -> dict[str, Member] | None:
        return None if self._stopped else {"": self._host}

    def stopped(self) -> list[tuple[str, int]]:
        return [("", number) for number in self._stopped]

    def run(
        self, members: Mapping[str, Member], slots: Sequence[Sequence[Slot]], start: int
    ) -> Seen:
        secret = secret_of_start(self._secret, self._job, start)
        self.store.open(slots[0], secret)
        assignment = Assignment(
            slots=slots[0],
            store=self.store.variables(secret),
            secret=secret,
            restart=start,
            seed=seed_of(self._job),
        )
        report = run_ranks(
            self._command,
            assignment,
            self._job,
            address=LOOPBACK,
            stopped=self._stopped,
        )
        return Seen({"": report})
