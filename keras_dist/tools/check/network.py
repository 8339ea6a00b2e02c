"""Addresses, names and clocks of the hosts, tried over plain sockets.

The first rank of each host answers connections for some seconds, with a random text
and its clock. Who connects knows by the text which host has answered.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.launch.network import addresses, gloo_address
from keras_dist.tools.check.checks import Found, failed, ok, untried, warning

_SECONDS = 5.0
_LONGEST = 200

# Each host tries so many others, so that the time does not grow with the hosts.
_MOST = 4

_LOCAL = ("localhost", "127.0.0.1")

# Seconds by which clocks may differ: more of it is confusing, and wrong.
_CONFUSING, _WRONG = 0.5, 5.0

# Addresses of a host's own name by which no other host reaches it.
_NOBODY = ("", "::1")

_HOSTS_FILE = "Let it resolve to that host's own address, in DNS or in /etc/hosts."


class Answerer:
    """Answer connections to this host, until it is closed.

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
        """Stop answering."""
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
    """Return names, addresses and network interface of this host."""
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
        "port": answerer.port,
        "token": answerer.token,
    }


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
    return [_try_host(index, hosts[index]) for index in others]


def _try_host(index: int, host: Mapping[str, Any]) -> dict[str, Any]:
    error, skew, doubt = _ask(host["address"], host)
    wrong = {}
    names = dict.fromkeys([host["named"], host["hostname"]])
    for name in names:
        found = _resolve(name)
        if name in _LOCAL or found in (None, host["address"]) or error:
            continue
        reason, _, _ = _ask(found, host)
        if reason:
            wrong[name] = f"{found} ({reason})"
    return {"host": index, "error": error, "wrong": wrong, "skew": skew, "doubt": doubt}


def _ask(address: str, host: Mapping[str, Any]) -> tuple[str, float, float]:
    """Return the error of connecting to a host, and the difference of the clocks.

    The last number is the uncertainty of the difference, in seconds.
    """
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


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def network(
    hosts: Sequence[Mapping[str, Any]], reached: Sequence[Sequence[Mapping[str, Any]]]
) -> Found:
    """Check that each host reaches the others at the address that the ranks use."""
    used = [f"{host['interface']} {host['address']}" for host in hosts]
    if len(hosts) == 1:
        return ok(used[0], interface=hosts[0]["interface"])
    errors = [
        f"{hosts[number]['named']} does not reach {hosts[each['host']]['named']} at "
        f"{hosts[each['host']]['address']}: {each['error']}"
        for number, tried in enumerate(reached)
        for each in tried
        if each["error"]
    ]
    if errors:
        return failed(
            "; ".join(errors),
            "A firewall between the hosts, or the wrong network: all ports have to "
            "be open between them, both from and to; `--address IP` names another "
            "address of this host.",
        )
    seen = "; ".join(
        f"{host['named']}: {text}" for host, text in zip(hosts, used, strict=True)
    )
    both = _addresses_of_many(hosts)
    if both:
        return ok(
            f"{seen}. Not used, since several hosts have the same address: "
            f"{', '.join(both)}; mpirun needs --mca btl_tcp_if_include for that"
        )
    return ok(seen)


def names(
    hosts: Sequence[Mapping[str, Any]],
    reached: Sequence[Sequence[Mapping[str, Any]]],
    is_patched: Sequence[bool],
) -> Found:
    """Check that names of hosts resolve to addresses by which others reach them."""
    if len(hosts) == 1:
        return ok("all ranks are on one host, over loopback")
    wrong = [
        f"on {hosts[number]['named']} the name {name} is {found}, and not "
        f"{hosts[each['host']]['address']}"
        for number, tried in enumerate(reached)
        for each in tried
        for name, found in each["wrong"].items()
    ]
    if wrong:
        return failed("; ".join(wrong), _HOSTS_FILE)
    own = [
        (f"{host['hostname']} is {host['own_address'] or 'unknown'} on itself", fixed)
        for host, fixed in zip(hosts, is_patched, strict=True)
        if not host["address"].startswith("127.")  # "hosts" that are one machine
        and (host["own_address"].startswith("127.") or host["own_address"] in _NOBODY)
    ]
    seen = "; ".join(text for text, _ in own)
    if not all(fixed for _, fixed in own):
        return failed(seen, _HOSTS_FILE)
    if own:
        return warning(
            seen,
            "The ranks of keras-dist do not need it, by its patch of Horovod; those of "
            f"other programs do. {_HOSTS_FILE}",
        )
    texts = [f"{host['named']} is {host['address']}" for host in hosts]
    return ok(", ".join(texts))


def clocks(
    hosts: Sequence[Mapping[str, Any]], reached: Sequence[Sequence[Mapping[str, Any]]]
) -> Found:
    """Check that the clocks of the hosts agree."""
    if len(hosts) == 1:
        return ok("one host")
    skews = {
        (number, each["host"]): each["skew"]
        for number, tried in enumerate(reached)
        for each in tried
        if not each["error"]
    }
    if not skews:
        return untried("no host reaches another one")
    (own, other), skew = max(skews.items(), key=lambda item: abs(item[1]))
    text = (
        f"{hosts[own]['named']} and {hosts[other]['named']} differ by {abs(skew):.3f} s"
    )
    cure = "Set the clocks by NTP (chrony, systemd-timesyncd) on all hosts."
    if abs(skew) > _WRONG:
        return failed(text, cure, seconds=skew)
    if abs(skew) > _CONFUSING:
        return warning(text, cure, seconds=skew)
    return ok(text, seconds=skew)


def _addresses_of_many(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = Counter(
        (name, address)
        for host in hosts
        for name, address in host["addresses"].items()
        if not address.startswith("127.")
    )
    return [
        f"{name} {address}" for (name, address), count in counts.items() if count > 1
    ]
