"""Whether this host is the first of those that meet: then the job's store is here."""

import errno
import secrets
import socket
import time
from collections.abc import Sequence

from keras_dist.launch import munge
from keras_dist.launch.hosts import LOOPBACK, has_only_ipv6
from keras_dist.launch.meeting import Meeting, is_loopback
from keras_dist.launch.rendezvous import Store
from keras_dist.launch.tls import TlsStore

_ALL = "0.0.0.0"
_RETRY_SECONDS = 0.5


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
