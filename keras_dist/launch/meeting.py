"""Hosts that meet: the same command on each of them, by hand or by a scheduler."""

import contextlib
import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keras_dist.launch import processes
from keras_dist.launch.agent import Agent
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import LOOPBACK, Meeting, Member, check_host
from keras_dist.launch.job import Job, OwnRanks
from keras_dist.launch.network import EVERYWHERE, has_only_ipv6, is_loopback
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import Command
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.store import Store, StoreClient

TIMEOUT_SECONDS = 300.0
_SHORTEST_SECRET, _RETRY_SECONDS = 16, 0.5


def check(meeting: Meeting, secret: str) -> None:
    """Check what the user has asked for.

    Raises:
        ValueError: If it cannot be used.
    """
    if meeting.number is not None and not 0 <= meeting.number < meeting.num_hosts:
        raise ValueError(
            "Hosts are numbered from 0 to one less than `--nnodes`. Received: "
            f"--node-rank {meeting.number} --nnodes {meeting.num_hosts}"
        )
    if len(secret) < _SHORTEST_SECRET and not is_loopback(meeting.address):
        received = f"{len(secret)} characters" if secret else "none"
        raise ValueError(
            "A job on several hosts needs a secret of at least "
            f"{_SHORTEST_SECRET} characters. Received: {received}. Set {SECRET} to "
            "the same value on all hosts, as from `openssl rand -hex 16`, or name a "
            "file with it by `--secret-file`."
        )


def read_secret(path: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Read the secret of the job: from a file, or else from the environment.

    Args:
        path: Path of the file, of which line ends do not count; `None` for none.
        environ: Environment variables; by default those of this process.

    Raises:
        OSError: If the file cannot be read.
    """
    if path is not None:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRGRP | stat.S_IROTH):
                print_message(
                    "keras-dist: other users of this machine may read the job's "
                    f"secret. Received: --secret-file {path} with mode "
                    f"{stat.S_IMODE(mode):o}. Call: chmod 600 {path}"
                )
            return file.read().strip()
    return (os.environ if environ is None else environ).get(SECRET, "")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Parse `--rdzv`: address and port.

    >>> parse_endpoint("a:29400"), parse_endpoint("a")
    (('a', 29400), ('a', 29400))

    Raises:
        ValueError: If it has another form.
    """
    address, _, port = text.partition(":")
    if not address or not (port or "29400").isdecimal() or text.endswith(":"):
        raise ValueError(
            "The hosts meet at the first one: its name or address, and a port. "
            f"Received: --rdzv {text}. For example: --rdzv a:29400"
        )
    check_host(address, source=f"--rdzv {text}")
    return address, int(port or "29400")


def run_meeting(
    command: Command, meeting: Meeting, secret: str, *, restarts: int, timeout: float
) -> int:
    """Take part in a job whose hosts meet, and end what this host has started.

    It installs signal handlers, so call it from the main thread of a process that does
    nothing else.

    Args:
        command: The command that every rank runs.
        meeting: Where the hosts meet.
        secret: Secret of the job.
        restarts: The largest number of restarts after failures; that of the first host
            counts.
        timeout: Seconds to wait for the other hosts.

    Returns:
        The exit code of the job, the same on all hosts.

    Raises:
        OSError: If the port is in use.
        RuntimeError: If Horovod is not installed.
        ValueError: If an argument cannot be used, or the hosts cannot meet.
    """
    check(meeting, secret)
    job, member = secrets.token_hex(8), Member(meeting.host, meeting.num_ranks or 1)
    # The reaper is forked, so before the first thread.
    with processes.reaper(job), stopped_by_signals(*meeting.signals) as stopped:
        store, address = store_if_first(meeting, timeout, stopped)
        if store is not None:
            own = OwnRanks(command, replace(member, number=0), job)
            with contextlib.closing(store):
                first = Job(meeting, store, secret, stopped, own=own)
                return first.run(restarts=restarts, timeout=timeout)
        agent = Agent(
            StoreClient(address, meeting.port, secret),
            secret,
            replace(member, number=meeting.number),
            num_hosts=meeting.num_hosts,
            stopped=stopped,
            is_quiet=meeting.is_quiet,
        )
        if not agent.join(timeout):
            return 128 + stopped[0]
        return agent.follow(command, job)


def store_if_first(
    meeting: Meeting, timeout: float = TIMEOUT_SECONDS, stopped: Sequence[int] = ()
) -> tuple[Store | None, str]:
    """Return the store, if this is the first host; and the address to reach it at.

    Args:
        meeting: Where the hosts meet.
        timeout: Seconds to wait until the name of the first host is known.
        stopped: The wait for the address ends as soon as this list is not empty.

    Raises:
        OSError: If this is the first host, and the port is in use.
        ValueError: If the name of the first host does not become known, or has IPv6
            addresses alone.
    """
    if has_only_ipv6(meeting.address):
        raise ValueError(
            "Hosts meet at an IPv4 address, by which their ranks connect, too. "
            f"Received: {meeting.address}, which has IPv6 addresses alone on this "
            "host. Name an IPv4 address of the first host, the same on all hosts: "
            f"--rdzv 10.0.0.1:{meeting.port}"
        )
    if meeting.number not in (None, 0):
        return None, meeting.address
    address = _resolved(meeting, timeout, stopped)
    if address is None:
        return None, meeting.address
    if address.startswith("127.") and not is_loopback(meeting.address):
        # Debian's own name, which the others know by another address.
        address = EVERYWHERE
    try:
        return Store(
            address, meeting.port
        ), LOOPBACK if address == EVERYWHERE else address
    except OSError as error:
        if meeting.number is None and error.errno in (
            errno.EADDRNOTAVAIL,  # not an address of this host
            errno.EADDRINUSE,  # several on one machine
        ):
            return None, meeting.address
        if error.errno == errno.EADDRNOTAVAIL:  # the others reach it by another one
            return Store(EVERYWHERE, meeting.port), LOOPBACK
        raise OSError(
            f"The job's store cannot listen at {address}:{meeting.port}. "
            f"Received: {error}. Name another port by `--rdzv`, the same on all hosts."
        ) from error


def _resolved(meeting: Meeting, timeout: float, stopped: Sequence[int]) -> str | None:
    """Look up the first host, whose name may become known only now."""
    begin = time.monotonic()
    while True:
        try:
            return socket.gethostbyname(meeting.address)
        except OSError as error:
            if meeting.number is None:
                return None  # a host knows its own name, so this is another one
            if stopped or time.monotonic() - begin > timeout:
                raise ValueError(
                    "The name of the first host is not known there. Received: "
                    f"{meeting.address} ({error})."
                ) from error
            time.sleep(_RETRY_SECONDS)
