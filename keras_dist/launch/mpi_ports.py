"""The ports of `mpirun`: once the ranks are connected, nobody connects to them.

`mpirun` listens at all addresses for daemons on other hosts, of which a job on one
machine has none, and on the loopback interface for its ranks. No setting of Open MPI
keeps it from that, so the launcher, its parent, takes copies of these sockets, and
attaches a filter by which the kernel drops each packet for them. Connections that are
made do not change.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

# The number of the system call `pidfd_getfd`, the same on all processors.
_PIDFD_GETFD = 438

# An option of Linux that Python does not name; and its filter of one instruction, which
# keeps 0 bytes of a packet: see socket(7) and linux/filter.h.
_SO_ATTACH_FILTER = 26
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)
_PROGRAM = struct.pack("HxxxxxxQ", 1, ctypes.addressof(_DROP))

_TICK = 0.5


@contextlib.contextmanager
def closed(pid: int, num_ranks: int) -> Iterator[None]:
    """Inside the block, strangers cannot connect to a server of MPI.

    To its ports on the network at once, and to that on the loopback interface as soon
    as all ranks are connected. Where the kernel does not let this process have copies
    of its child's sockets, they stay open.

    Args:
        pid: Id of the process.
        num_ranks: How many ranks are going to connect.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_close, args=(pid, num_ranks, is_over))
    with contextlib.suppress(OSError):
        close_ports(pid, is_loopback=False)
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()


def close_ports(pid: int, *, is_loopback: bool) -> None:
    """Drop all packets to the ports at which a process listens.

    Args:
        pid: Id of the process, of this user.
        is_loopback: Whether to those on the loopback interface, or to the others.

    Raises:
        OSError: If its sockets cannot be had.
    """
    with _sockets(pid) as found:
        for each in filter(_is_listening, found):
            if is_loopback == _is_on_loopback(each):
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)


def num_connected(pid: int) -> int:
    """Return how many connections others have made to the ports of a process.

    Args:
        pid: Id of the process, of this user.

    Raises:
        OSError: If its sockets cannot be had.
    """
    with _sockets(pid) as found:
        ports = {s.getsockname()[1] for s in found if _is_listening(s)}
        others = [s for s in found if not _is_listening(s)]
        return sum(s.getsockname()[1] in ports for s in others)


def _close(pid: int, num_ranks: int, is_over: threading.Event) -> None:
    """In the thread, wait for the ranks, and close the port by which they came."""
    with contextlib.suppress(OSError):  # the server has ended
        while num_connected(pid) < num_ranks:
            if is_over.wait(_TICK):
                return
        close_ports(pid, is_loopback=True)


@contextlib.contextmanager
def _sockets(pid: int) -> Iterator[Collection[socket.socket]]:
    """Copies of the TCP sockets of a process."""
    with contextlib.ExitStack() as left:
        process = os.pidfd_open(pid)
        left.callback(os.close, process)
        found = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                if not os.readlink(path).startswith("socket:"):
                    continue
                copy = left.enter_context(_copy(process, int(path.name)))
                is_tcp = copy.type == socket.SOCK_STREAM
                if is_tcp and copy.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(copy)
        yield found


def _copy(process: int, descriptor: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=copy)


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_on_loopback(each: socket.socket) -> bool:
    return each.getsockname()[0] in ("127.0.0.1", "::1")
