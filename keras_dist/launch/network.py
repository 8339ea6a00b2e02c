"""Addresses of this host and its network interfaces, by which other hosts reach it."""

import fcntl
import re
import socket
import struct
import subprocess

# All addresses of this host.
EVERYWHERE = "0.0.0.0"

_SIOCGIFADDR = 0x8915
_SCONTROL_SECONDS = 30.0


def is_loopback(address: str) -> bool:
    """Return whether no other machine can reach an address."""
    return address == "localhost" or address.startswith("127.")


def address_towards(host: str) -> str:
    """Return the address of this host on the network that leads to another host.

    Raises:
        ValueError: If the other host is not known, or cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.rpartition("@")[2], 9))  # sends nothing
        except OSError as error:
            raise ValueError(
                f"A host cannot be reached. Received: {host} ({error}). Ranks connect "
                "by IPv4. If only ssh knows that name, pass the IPv4 address of the "
                "first host, as the others can reach it: --rdzv 10.0.0.1:29400"
            ) from error
        return str(probe.getsockname()[0])


def resolve_node(node: str) -> str:
    """Return the name of a node, or its address if only SLURM knows the name.

    Raises:
        ValueError: If there is none.
    """
    try:
        socket.gethostbyname(node)
    except OSError:
        words = ["scontrol", "show", "node", node]
        try:
            text = subprocess.run(
                words, capture_output=True, text=True, timeout=_SCONTROL_SECONDS
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
        found = re.search(r"NodeAddr=(\S+)", text)
        if found is None:
            raise ValueError(
                f"The address of a node of this step is not known. Received: {node}. "
                "Its name has to resolve, or `scontrol show node` has to answer."
            ) from None
        return found[1]
    return node


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this host, by its name.

    >>> addresses()["lo"]
    '127.0.0.1'
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface(address: str) -> dict[str, str]:
    """Return the variables for the network interface on which ranks listen.

    Args:
        address: Address of this host, by which the ranks of other hosts reach it.

    >>> interface("127.0.0.1")["HOROVOD_GLOO_IFACE"]
    'lo'

    Raises:
        ValueError: If no interface has this address.
    """
    for name, found in addresses().items():
        if found == address:
            return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}
    raise ValueError(
        f"No network interface of this host has this address. Received: {address}. "
        "Name the first host by an address that the others can reach: --rdzv."
    )
