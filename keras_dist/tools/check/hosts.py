"""Addresses, names and clocks of the hosts, tried over plain sockets.

The first rank of each host answers connections for some seconds, with a random text
and its clock. Who connects knows by the text which host has answered.
"""

import contextlib
import ctypes
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.launch.hosts import addresses
from keras_dist.launch.own_name import gloo_address

_SECONDS = 5.0
_LONGEST = 200

# Each host tries so many others, so that the time does not grow with the hosts.
_MOST = 4

# Of Linux: the request of `ethtool`, its first command, and bytes of its answer, with
# the speed in megabits at 12, and what does not fit there at 28.
_SIOCETHTOOL, _ETHTOOL_GET, _ETHTOOL_SIZE = 0x8946, 1, 44

_LOCAL = ("localhost", "127.0.0.1")


class Answerer:
    """Answers connections to this host, until it is closed.

    Args:
        address: Address at which it listens; empty for all of them, since a name of
            this host may be another address than that of the ranks.
    """

    def __init__(self, address: str = "") -> None:
        self.token = secrets.token_hex(8)
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                link.settimeout(_SECONDS)
                link.sendall(f"{self.token} {time.time()!r}\n".encode())


def host_facts(answerer: Answerer) -> dict[str, Any]:
    """Names, addresses and network interface of this host."""
    own = socket.gethostname()
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    known = addresses()
    return {
        "hostname": own,
        "named": os.environ.get("HOROVOD_HOSTNAME", own),
        "own_address": gloo_address(own) or "",
        "interface": interface,
        "address": known.get(interface, ""),
        "addresses": known,
        "bits_per_second": nominal_speed(interface),
        "port": answerer.port,
        "token": answerer.token,
    }


def nominal_speed(interface: str) -> float:
    """Bits per second of a network card by its driver; 0 if it is not known.

    As `ethtool` asks for it: the files of /sys may be those of another network
    namespace.
    """
    answer = bytearray(_ETHTOOL_SIZE)
    answer[:4] = struct.pack("I", _ETHTOOL_GET)
    held = (ctypes.c_char * _ETHTOOL_SIZE).from_buffer(answer)
    request = struct.pack("16sP", interface.encode()[:15], ctypes.addressof(held))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, request)
        except OSError:  # it is no card
            return 0.0
    (low,) = struct.unpack_from("H", answer, 12)
    (high,) = struct.unpack_from("H", answer, 28)
    megabits = high << 16 | low
    return 0.0 if megabits in (0xFFFF, 0xFFFFFFFF) else megabits * 1e6


def reach(own: int, hosts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Connect to other hosts, by their addresses and by their names.

    Args:
        own: Index of this host.
        hosts: `host_facts` of each host.

    Returns:
        For each host that was tried: its index; the error by its address, empty if it
        has answered; what its names are here that lead elsewhere; the difference of the
        clocks in seconds, and how uncertain it is.
    """
    count = len(hosts)
    others = [(own + step) % count for step in range(1, min(count, _MOST + 1))]
    return [_reached(index, hosts[index]) for index in others]


def _reached(index: int, host: Mapping[str, Any]) -> dict[str, Any]:
    error, skew, doubt = _asked(host["address"], host)
    wrong = {}
    names = dict.fromkeys([host["named"], host["hostname"]])
    for name in names:
        found = _resolved(name)
        if name in _LOCAL or found in (None, host["address"]) or error:
            continue
        reason, _, _ = _asked(found, host)
        if reason:
            wrong[name] = f"{found} ({reason})"
    return {"host": index, "error": error, "wrong": wrong, "skew": skew, "doubt": doubt}


def _asked(address: str, host: Mapping[str, Any]) -> tuple[str, float, float]:
    """The error of connecting to a host; difference of the clocks, and its doubt."""
    begin = time.time()
    try:
        with socket.create_connection((address, host["port"]), _SECONDS) as link:
            begin = time.time()
            text = link.recv(_LONGEST).decode(errors="replace")
    except OSError as error:
        return error.strerror or str(error), 0.0, 0.0
    end = time.time()
    token, _, clock = text.strip().partition(" ")
    if token != host["token"]:
        return "another host answers", 0.0, 0.0
    return "", float(clock) - (begin + end) / 2, (end - begin) / 2


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
