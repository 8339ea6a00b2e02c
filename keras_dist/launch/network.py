"""Addresses of this host and its network interfaces, by which other hosts reach it."""

import fcntl
import socket
import struct

from keras_dist.launch.failures import print_message

# All addresses of this host.
EVERYWHERE = "0.0.0.0"

_SIOCGIFADDR = 0x8915

# Seconds in which a host has to reach the store.
_REACH_SECONDS = 10.0

_CURE = (
    "The Horovod of this environment was built without keras_dist's patch: run "
    "`keras-dist install-horovod` on each host, or let the name resolve to that "
    "address in /etc/hosts."
)


def own_address(named: str | None, other: str) -> str:
    """Return the address of this host by which other hosts reach it.

    Args:
        named: What the user has named, as by `--address`; `None` to find it by routing.
        other: Name of another host.

    Raises:
        ValueError: If it is not one of this host, or of IPv6; or as `address_towards`.
    """
    if named is None:
        return address_towards(other)
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind((named, 0))
        except OSError as error:
            raise ValueError(
                "No network interface of this host has this address. Received: "
                f"{named} ({error}). Pass an IPv4 address of this host with "
                "`--address`."
            ) from error
    return named


def address_towards(host: str) -> str:
    """Return the address of this host on the network that leads to another host.

    Raises:
        ValueError: If the other host is not known, or cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.rpartition("@")[2], 9))  # sends nothing
        except OSError as error:
            version = "; it has IPv6 addresses alone" if has_only_ipv6(host) else ""
            raise ValueError(
                f"A host cannot be reached. Received: {host} ({error}{version}). If "
                "only ssh knows that name, pass the IPv4 address of this host, as the "
                "other host can reach it, with `--address`."
            ) from error
        return str(probe.getsockname()[0])


def has_only_ipv6(host: str) -> bool:
    """Return whether a name has only IPv6 addresses here, which Gloo cannot use."""
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2], None)
    except OSError:
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def interface_of(address: str) -> str:
    """Return the name of the network interface with an address of this host.

    >>> interface_of("127.0.0.1")
    'lo'

    Raises:
        ValueError: If no interface has this address.
    """
    for name, found in addresses().items():
        if found == address:
            return name
    raise ValueError(
        f"No network interface of this host has this address. Received: {address}. "
        "Pass an address of this host with `--address`."
    )


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
    """
    name = interface_of(address)
    return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}


def is_loopback(address: str) -> bool:
    """Return whether no other machine can reach an address."""
    return address == "localhost" or address.startswith("127.")


def check_reach(address: str, port: int) -> None:
    """Connect to the store once, before any rank is started.

    A firewall that lets only ssh in would otherwise be noticed by Horovod after 120 s.

    Args:
        address: Address of the launcher's host.
        port: Port of the store.

    Raises:
        ValueError: If there is no connection within 10 s.
    """
    try:
        socket.create_connection((address, port), _REACH_SECONDS).close()
    except OSError as error:
        raise ValueError(
            "The launcher's host cannot be reached from another host. Received: "
            f"{socket.gethostname()} cannot reach {address}:{port} ({error}). Ranks "
            "and launcher connect at ports that the system chooses: open all ports "
            "between the hosts, or name another network by `--address`."
        ) from error


def check_own_name(address: str) -> None:
    """Check that this host's own name leads to the address of the ranks' network.

    Without the patch (see `install.patch`) Gloo listens at the first address of the
    host's name that it can bind, whatever interface was named.

    Args:
        address: Address of this host by which the others reach it.

    Raises:
        ValueError: If the name does not resolve, or to an address of loopback.
    """
    if address.startswith("127."):
        return  # the "hosts" are this machine by other names
    name = socket.gethostname()
    found = gloo_address(name)
    if found is None or found.startswith("127.") or found == "::1":
        raise ValueError(
            "Ranks on other hosts could not connect to those of this host. Received: "
            f"the name {name} resolves there to {found or 'no address'}, and not to "
            f"{address}. {_CURE}"
        )
    if found != address:
        print_message(
            f"keras-dist: {name} is {found} by its own name, so gradients do not use "
            f"the network of {address}. {_CURE}"
        )


def gloo_address(name: str) -> str | None:
    """Return the address that Gloo takes for a name; `None` if there is none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return str(address[0])
    return None
