"""Start a job without ssh: the same command on each host, which meet at an address."""

import errno
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from keras_dist.launch import munge, processes
from keras_dist.launch.coordinator import Coordinator
from keras_dist.launch.follower import Follower
from keras_dist.launch.host_store import HostStore
from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.meeting import Meeting, Plan, check, is_loopback
from keras_dist.launch.members import Member
from keras_dist.launch.ranks import Command
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.signals import stopped_by_signals
from keras_dist.launch.spares import Spares
from keras_dist.launch.tls import TlsStore
from keras_dist.version import __version__

_ALL = "0.0.0.0"
_RETRY_SECONDS = 0.5


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
        spares=Spares() if meeting.has_spares else None,
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


def secret_of(
    meeting: Meeting,
    store: Store | None,
    address: str,
    stopped: Sequence[int] = (),
) -> str:
    """The secret of the job; under SLURM, the first host passes one by munge.

    Args:
        meeting: Where the hosts meet.
        store: The store, on the first host.
        address: Address of the first host.
        stopped: The wait for it ends as soon as this list is not empty.

    Raises:
        ValueError: If there is none.
    """
    if meeting.secret or meeting.has_tls or not meeting.has_munge:
        return meeting.secret
    if store is None:
        wait = meeting.timeout
        return munge.received(address, meeting.port, timeout=wait, stopped=stopped)
    secret = secrets.token_hex(16)
    store.publish(munge.PATH, lambda: munge.credential(secret))
    return secret


def store_if_first(
    meeting: Meeting, stopped: Sequence[int] = ()
) -> tuple[Store | None, str]:
    """The store if this is the first host; and the address at which it is reached.

    Args:
        meeting: Where the hosts meet.
        stopped: The wait for the address ends as soon as this list is not empty.

    Raises:
        OSError: If this is the first host, and the port is in use.
        ValueError: If the name of the first host does not become known.
    """
    if meeting.number not in (None, 0):
        return None, meeting.address
    address = _resolved(meeting, stopped)
    if address is None:
        return None, meeting.address
    if address.startswith("127.") and not is_loopback(meeting.address):
        address = _ALL  # Debian's own name, which the others know by another address
    try:
        return _listening(meeting, address), _reached(address)
    except OSError as error:
        if meeting.number is None and error.errno in (
            errno.EADDRNOTAVAIL,  # not an address of this host
            errno.EADDRINUSE,  # several on one machine
        ):
            return None, meeting.address
        if error.errno == errno.EADDRNOTAVAIL:  # the others reach it by another one
            return _listening(meeting, _ALL), LOOPBACK
        raise OSError(
            f"The job's store cannot listen at {address}:{meeting.port}. "
            f"Received: {error}. Name another port by `--rdzv`, the same on all hosts."
        ) from error


def _listening(meeting: Meeting, address: str) -> Store:
    if meeting.has_tls:
        return TlsStore(address, meeting.port, meeting.secret)
    return Store(address, meeting.port)


def _reached(address: str) -> str:
    return LOOPBACK if address == _ALL else address


def _resolved(meeting: Meeting, stopped: Sequence[int]) -> str | None:
    """The address of the first host, by a name that may become known only now."""
    begin = time.monotonic()
    while True:
        try:
            return socket.gethostbyname(meeting.address)
        except OSError as error:
            if meeting.number is None:
                return None  # a host knows its own name, so this is another one
            if stopped or time.monotonic() - begin > meeting.timeout:
                raise ValueError(
                    "The name of the first host is not known there. Received: "
                    f"{meeting.address} ({error})."
                ) from error
            time.sleep(_RETRY_SECONDS)
