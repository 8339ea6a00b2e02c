"""In the process of the first host: who has come, and what each host has to do."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from keras_dist.launch.failures import print_message
from keras_dist.launch.heartbeat import Presence
from keras_dist.launch.host_store import FirstHostStore
from keras_dist.launch.members import Member, numbered
from keras_dist.launch.rendezvous import Store
from keras_dist.version import __version__

TICK = 0.1

# Seconds between two lines about hosts that are missing.
_SAY_SECONDS = 15.0

# Seconds for which the store stays until all hosts have seen the end.
_LEAVE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the first host was asked for.

    Args:
        num_hosts: Number of hosts.
        restarts: The largest number of restarts.
        timeout: Seconds to wait for all hosts.
        meeting: Where the others find the store, in words.
        names: Names of all hosts, if they are known.
        saved_code: Exit code when a signal has stopped the job and all ranks have
            saved; `None` for that of the signal.
    """

    num_hosts: int
    restarts: int
    timeout: float
    meeting: str
    names: Sequence[str] = ()
    saved_code: int | None = None


class Gathering:
    """The hosts of a job as the first one sees them, through its store.

    Args:
        store: The store of the job.
        secret: Secret of the job.
        plan: What the first host was asked for.
        first: Id of the first host's own member.
    """

    def __init__(self, store: Store, secret: str, plan: Plan, first: str) -> None:
        self.values = FirstHostStore(store, secret)
        self.presence = Presence[str](self.values)
        self._plan, self._first = plan, first
        self._chosen: list[str | None] = []

    def wait(self) -> dict[str, Member] | None:
        """Wait for all hosts; `None` if the job was stopped.

        Raises:
            TimeoutError: If some are missing.
        """
        begin = said = time.monotonic()
        while not self.stops():
            members = self._members()
            numbers = numbered(members, self._plan.num_hosts, self._chosen)
            chosen = {name: members[name] for name in numbers if name is not None}
            now = time.monotonic()
            if len(chosen) == self._plan.num_hosts:
                self._chosen = numbers
                return chosen
            text = self._missing(members, numbers)
            if now - begin > self._plan.timeout:
                raise TimeoutError(
                    f"Not all hosts have come within {self._plan.timeout:g} s. "
                    f"Received: {text}. Start the same command on each of them; "
                    f"each has to reach {self._plan.meeting}."
                )
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for hosts: {text}.")
            time.sleep(TICK)
        return None

    def _missing(self, members: dict[str, Member], numbers: list[str | None]) -> str:
        """Who is there, and who is missing."""
        there = [members[name].host for name in numbers if name is not None]
        away = [number for number, name in enumerate(numbers) if name is None]
        known = [self._plan.names[number] for number in away if self._plan.names]
        named = known or [f"node rank {number}" for number in away]
        return (
            f"{len(there)} of {self._plan.num_hosts} ({', '.join(there)}); "
            f"missing: {', '.join(named)}"
        )

    def _members(self) -> dict[str, Member]:
        """The hosts that have come and are alive, in the order in which they came."""
        found = self.values.of_kind("join")
        gone = {**self.values.of_kind("left"), **self.values.of_kind("stopped")}
        names = [name for name in found if name not in gone]
        self.presence.look(names)
        lost = self.presence.lost(names)
        members = {n: Member(**found[n]) for n in names if n not in lost}
        for name, member in list(members.items()):
            if (member.num_hosts, member.version) == (
                self._plan.num_hosts,
                __version__,
            ):
                continue
            del members[name]
            text = (
                "keras-dist: the hosts of a job have to agree on `--nnodes` and on the "
                f"version of keras_dist. Received: {member.num_hosts} and "
                f"{member.version} here, {self._plan.num_hosts} and {__version__} on "
                "the first host."
            )
            self.order(name, do="exit", code=1, text=text)
        return members

    def stops(self) -> list[int]:
        """Numbers of the signals that hosts of the job have received."""
        return [number for _, number in self.stopped()]

    def stopped(self) -> list[tuple[str, int]]:
        """The hosts of the job that have received a signal, and its number."""
        found = self.values.of_kind("stopped")
        known = {self._first, *self._chosen}
        return [(name, number) for name, number in found.items() if name in known]

    def order(self, name: str, **values: Any) -> None:
        """Write what a host has to do now."""
        self.values.put(f"order.{name}", values)

    def send_end(self, code: int, text: str) -> None:
        """Let all hosts end, and wait until they have seen it.

        Args:
            code: The exit code of the job.
            text: The message, which the first host has printed.
        """
        found = self.values.of_kind("join")
        first = self._plan.meeting.partition(":")[0]
        for name, member in found.items():
            line = text.partition("\n")[0]
            if name == self._first or member["is_quiet"]:
                line = ""  # it is on this screen already
            elif line != text:
                line = f"{line} All of it is in the output of {first}."
            self.order(name, do="exit", code=code, text=line)
        begin = time.monotonic()
        while time.monotonic() - begin < _LEAVE_SECONDS:
            left = self.values.of_kind("left")
            staying = [name for name in found if name not in left]
            self.presence.look(staying)
            if not set(staying) - set(self.presence.lost(staying)):
                return
            time.sleep(TICK)
