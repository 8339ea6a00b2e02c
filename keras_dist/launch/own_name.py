"""Check a host's own name, on which a Horovod without our patch depends."""

import socket
import sys

_CURE = (
    "The Horovod of this environment was built without keras_dist's patch: run "
    "`keras-dist install-horovod` on each host, or let the name resolve to that "
    "address in /etc/hosts."
)


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
        print(
            f"keras-dist: {name} is {found} by its own name, so gradients do not use "
            f"the network of {address}. {_CURE}",
            file=sys.stderr,
            flush=True,
        )


def gloo_address(name: str) -> str | None:
    """The address that Gloo takes for a name; `None` if there is none."""
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
