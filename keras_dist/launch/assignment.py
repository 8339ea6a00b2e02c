"""What one host has to know of a job, however the job was started."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.launch.hosts import Slot
from keras_dist.launch.monitor import seeds
from keras_dist.launch.rendezvous import derived, interface

# The variable with the secret by which the ranks sign objects that they send.
SECRET = "KERAS_DIST_SECRET"

# The variable with the number of the restart, from 1; not set in the first run.
RESTART = "KERAS_DIST_RESTART"

# Seconds for which a rank waits for the others to connect.
_CONNECT, _CONNECT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS", 120


@dataclass(frozen=True)
class Assignment:
    """Which ranks a host runs, where their store is, and who watches the host.

    Each way to start a job makes one for each host: `keras-dist run` on one machine, by
    ssh, by a rendezvous and under SLURM, and what starts ranks by another system.

    Args:
        slots: The slots of this host's ranks.
        store: Variables by which Horovod finds the store, as of `rendezvous`.
        secret: The secret by which the ranks sign.
        number: Under which the host sends heartbeats and its report to the store;
            `None` if nobody waits for them.
        restart: Number of the restart; 0 in the first run.
        tls: Where the store is reached by TLS, `port` and `digest`, as of `Exit`; then
            `store` is for its own host. `None` without TLS.
        seed: The seed of what the scripts of all ranks draw, as of `seed_of`.
    """

    slots: Sequence[Slot]
    store: Mapping[str, str]
    secret: str
    number: int | None = None
    restart: int = 0
    tls: Mapping[str, Any] | None = None
    seed: str = ""

    def variables(self, address: str) -> dict[str, str]:
        """The environment variables that all ranks of the host have in common.

        Args:
            address: Address of the host, by which the others reach it.
        """
        own = {**self.store, SECRET: self.secret, **interface(address)}
        if self.seed:
            own[seeds.VARIABLE] = self.seed
        return {**own, RESTART: str(self.restart)} if self.restart else own

    def environment(self, slot: Slot, address: str) -> dict[str, str]:
        """All variables of one rank, for those who start it themselves.

        They have to be there before `keras_dist` is imported, which chooses the device.

        Args:
            slot: The slot of the rank.
            address: Address of its host, by which the others reach it.
        """
        return {**self.variables(address), **slot.environment()}


def assignments(
    slots: Sequence[Slot],
    store: Mapping[str, str],
    secret: str,
    *,
    restart: int = 0,
    tls: Mapping[str, Any] | None = None,
    seed: str = "",
) -> list[Assignment]:
    """One assignment for each host, in the order of the slots.

    Args:
        slots: The slots of all ranks, host by host.
        store: As of `rendezvous`.
        secret: As of `Assignment`.
        restart: Number of the restart; 0 in the first run.
        tls: As of `Assignment`.
        seed: See `Assignment`.
    """
    hosts = itertools.groupby(slots, key=lambda slot: slot.host)
    return [
        Assignment(list(own), store, secret, number, restart, tls, seed)
        for number, (_, own) in enumerate(hosts)
    ]


def seed_of(job: str) -> str:
    """Return the seed that the scripts of all ranks start from, also after a restart.

    Args:
        job: A text that is another one for each job.
    """
    given = os.environ.get(seeds.VARIABLE)
    return given or str(int(derived(job, "seed")[:8], 16))


def patience() -> dict[str, str]:
    """The variable by which ranks wait for others that start later, if it is not set.

    Importing TensorFlow may take a minute longer on one host than on another one.
    """
    return {} if _CONNECT in os.environ else {_CONNECT: str(_CONNECT_SECONDS)}


def assignment_of(values: Mapping[str, Any]) -> Assignment:
    """The assignment that `dataclasses.asdict` has made to values of JSON."""
    return Assignment(**{**values, "slots": [Slot(**each) for each in values["slots"]]})
