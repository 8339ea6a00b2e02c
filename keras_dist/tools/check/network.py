"""Networks, names and clocks of the hosts: is what they have tried as it has to be?"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.tools.check.reporting import Found, failed, ok, untried, warning

# Seconds by which clocks may differ: more of it is confusing, and wrong.
_CONFUSING, _WRONG = 0.5, 5.0

# Addresses of a host's own name by which no other host reaches it.
_NOBODY = ("", "::1")

_HOSTS_FILE = "Let it resolve to that host's own address, in DNS or in /etc/hosts."


def network(
    hosts: Sequence[Mapping[str, Any]], reached: Sequence[Sequence[Mapping[str, Any]]]
) -> Found:
    """Does each host reach the others at the address that the ranks use?"""
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
    """Do the names of the hosts resolve to addresses by which the others reach them?"""
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
    """Do the clocks of the hosts agree?"""
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
