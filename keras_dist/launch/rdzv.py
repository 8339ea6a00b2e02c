"""Start a job without ssh: the same command on each host, which meet at an address."""

import secrets
from dataclasses import replace

from keras_dist.launch import processes
from keras_dist.launch.coordinator import Coordinator
from keras_dist.launch.first_host import secret_of, store_if_first
from keras_dist.launch.follower import Follower
from keras_dist.launch.host_store import HostStore
from keras_dist.launch.meeting import Meeting, Plan, check
from keras_dist.launch.members import Member
from keras_dist.launch.ranks import Command
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.signals import stopped_by_signals
from keras_dist.launch.spares import Spares
from keras_dist.version import __version__


def run_meeting(command: Command, meeting: Meeting, restarts: int = 0) -> int:
    """Take part in a job whose hosts meet, and end what this host has started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        meeting: Where the hosts meet.
        restarts: The largest number of restarts; that of the first host counts.

    Returns:
        The exit code of the job, the same on all hosts.

    Raises:
        OSError: If the port is in use.
        RuntimeError: If Horovod is not installed.
        ValueError: If an argument cannot be used, or the hosts cannot meet.
    """
    check(meeting, restarts)
    job = secrets.token_hex(8)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals(*meeting.signals) as stopped:
        store, address = store_if_first(meeting, stopped)
        try:
            secret = secret_of(meeting, store, address, stopped)
            return _take_part(
                command,
                replace(meeting, secret=secret),
                store,
                address,
                restarts=restarts,
                job=job,
                stopped=stopped,
            )
        finally:
            if store is not None:
                store.close()


def _spares(meeting: Meeting) -> Spares | None:
    """Where hosts come and go, some are started while one of them is silent."""
    if not (meeting.has_spares or meeting.is_elastic):
        return None
    return Spares(is_lasting=meeting.has_spares)


def _take_part(
    command: Command,
    meeting: Meeting,
    store: Store | None,
    address: str,
    *,
    restarts: int,
    job: str,
    stopped: list[int],
) -> int:
    member = Member(
        host=meeting.host,
        num_ranks=meeting.num_ranks,
        number=0 if store else meeting.number,
        num_hosts=meeting.num_hosts,
        version=__version__,
        is_quiet=meeting.is_quiet,
        min_hosts=meeting.min_hosts,
    )
    follower = Follower(
        HostStore(address, meeting.port, meeting.secret, has_tls=meeting.has_tls),
        meeting.secret,
        member,
        is_first=store is not None,
        timeout=meeting.timeout,
        stopped=stopped,
        spares=_spares(meeting),
    )
    coordinator = None
    if store is not None:
        plan = Plan(
            num_hosts=meeting.num_hosts,
            restarts=restarts,
            timeout=meeting.timeout,
            meeting=f"{meeting.address}:{meeting.port}",
            names=meeting.names,
            saved_code=meeting.saved_code,
            min_hosts=meeting.min_hosts,
        )
        coordinator = Coordinator(store, meeting.secret, plan, follower.name)
        coordinator.start()
    if not follower.join():
        return 128 + stopped[0]
    code = follower.follow(command, job)
    if coordinator is not None:
        coordinator.join()
    return code
