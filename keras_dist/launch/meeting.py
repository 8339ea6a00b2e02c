"""Values that the hosts or ranks of a job give each other, by the store of the first.

All members run the same lines. What each of them gives to `gather`, the first one
combines, and all get the result.
"""

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist.clusters import Place
from keras_dist.launch.hosts import interface_variables, is_loopback, ranges
from keras_dist.launch.output import print_message
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.signing import derive_secret
from keras_dist.launch.store import MANY, Store, StoreClient, store_variables
from keras_dist.launch.time_limits import TimeLimits
from keras_dist.version import __version__

# Seconds between two heartbeats of a member; of all together there are at most so many
# a second. Seconds between two looks at what others have written.
_BEAT_SECONDS, _MOST_BEATS, _TICK = 0.25, 200, 0.1

# What stands for a signal when the command that has started this one is gone.
CUT = 0

# Seconds between two lines about missing members; and for which the store stays until
# all have read the last result.
_SAY_SECONDS, _LEAVE_SECONDS = 15.0, 10.0

Combine = Callable[[Sequence[Any]], dict[str, Any]]


class Interrupted(Exception):
    """A signal, whose number is the argument, has ended the job before all had come."""


class Meeting:
    """The members of a job, as one of them sees them.

    The first one serves the job's store, to the end of its process. In its block each
    has a thread that writes, with each heartbeat, all that this member has given so
    far, and reads what the others have written: what an outage loses comes with the
    next one.

    Args:
        place: Number of this member, number of members, and where the first one is.
        secret: Secret of the job.
        kind: What the members are: "host" or "rank".
        name: Name of this host.
        timeout: Seconds to wait for the first member, or there for all.
        stopped: Numbers of the signals that this process has received.

    Attributes:
        nonce: A text that all members have in common, another one in each job.

    Raises:
        OSError: If the port is in use.
    """

    def __init__(
        self,
        place: Place,
        secret: str,
        *,
        kind: str,
        name: str,
        timeout: float,
        stopped: Sequence[int] = (),
    ) -> None:
        self._number, self._size, self._secret = place.rank, place.size, secret
        self._kind, self._name, self._timeout = kind, name, timeout
        self._stopped, self._lost_seconds = stopped, TimeLimits().lost
        address, self._port = place.address, place.port
        if self._number == 0:
            is_alone = place.local_size == place.size
            store = Store(secret, address, self._port, is_alone=is_alone)
            address, self._port = store.address, store.port
        self._meeting = f"{address}:{self._port}"
        self._client = StoreClient(address, self._port, secret)
        # This host and the first one, as others reach them.
        self._addresses = "", ""
        # The note of each member: its heartbeat, its signals, and its values by name;
        # and the seconds for which it has sent no new heartbeat.
        self._notes: list[dict[str, Any]] = [{} for _ in range(self._size)]
        self._silent = [0.0] * self._size
        self._is_over, self._has_more = threading.Event(), threading.Event()
        self._is_gathering = False  # so that beats are quick
        self._thread = threading.Thread(target=self._keep_in_touch, daemon=True)
        self.nonce = secrets.token_hex(16)
        if self._number == 0:
            self._client.put("job", self.nonce, attempts=MANY)

    def __enter__(self) -> "Meeting":
        end = time.monotonic() + self._timeout
        while not (nonce := self._client.get("job")):
            if self._stopped:
                raise Interrupted(self._stopped[0])
            if self._client.is_refused:
                raise ValueError(
                    "The first host refuses this one. Received: a secret that differs "
                    f"from the secret of the job at {self._meeting}. Give all hosts "
                    "the same KERAS_DIST_SECRET."
                )
            if time.monotonic() > end:
                raise ValueError(
                    f"The first host cannot be reached. Received: {self._name} cannot "
                    f"reach {self._meeting} ({self._client.error}), for "
                    f"{self._timeout:g} s. Start the same command there, and open all "
                    "ports between the hosts."
                )
            time.sleep(_TICK)
        self.nonce = nonce
        if self._size > 1:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._size == 1:
            return
        end = time.monotonic() + _LEAVE_SECONDS * (not self.is_cut)
        while self._number == 0 and time.monotonic() < end:
            here = {k for k, note in enumerate(self._notes) if k and note}
            if not here - set(self.lost):
                break
            time.sleep(_TICK)
        self._is_over.set()
        self._has_more.set()
        self._thread.join()
        self._client.put(f"{self.nonce}.{self._number}", None)  # another one may come

    @property
    def is_cut(self) -> bool:
        """True if what has started this member is gone, so that it waits for nobody."""
        return CUT in self._stopped

    @property
    def lost(self) -> list[int]:
        """Other members that have sent no heartbeat for a while."""
        silent = enumerate(self._silent)
        return [k for k, seconds in silent if seconds > self._lost_seconds]

    @property
    def signals(self) -> dict[int, Sequence[int]]:
        """The signals that each member has received, if any, by its number."""
        signals = {k: note.get("signals") for k, note in enumerate(self._notes)}
        signals[self._number] = self._stopped
        return {k: numbers for k, numbers in signals.items() if numbers}

    def find(self, name: str) -> list[Any]:
        """Return the values that members have given to `gather` so far."""
        return [note[name] for note in self._notes if name in note]

    def join(self, value: Any, combine: Combine) -> dict[str, Any]:
        """Wait for all members; see `gather`.

        Raises:
            Interrupted: If this member or the first one was stopped before.
            ValueError: If members are missing, have the same number, or do not agree
                on their version and on how many they are.
        """
        facts = [self._size, __version__]
        self._addresses = self._client.ends
        own = [self._name, secrets.token_hex(8), facts, self._addresses[1], value]
        begin = said = time.monotonic()

        def look() -> None:
            nonlocal said
            signals = self.signals
            if numbers := signals.get(self._number) or signals.get(0):
                raise Interrupted(numbers[0])
            if self._number:
                return
            missing, now = self._find_missing("join"), time.monotonic()
            hosts = Counter(host for host, *_ in self.find("join"))
            came = ", ".join(f"{count} on {host}" for host, count in hosts.items())
            text = (
                f"{self._size - len(missing)} of {self._size} ({came}); missing: "
                f"{self._kind} {ranges(missing)}"
            )
            if now - begin > self._timeout:
                raise TimeoutError(
                    f"Not all {self._kind}s have arrived within {self._timeout:g} s. "
                    f"Received: {text}. Their own output shows the cause; each has to "
                    f"be started, and to reach {self._meeting}. To wait longer, set "
                    f"KERAS_DIST_{self._kind.upper()}S_SECONDS."
                )
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: waiting for {self._kind}s: {text}.")

        def check(members: Sequence[Any]) -> dict[str, Any]:
            for number, (host, _, others, *_) in enumerate(members):
                if others != facts:
                    raise ValueError(
                        f"The {self._kind}s disagree on their number, or on the "
                        f"version of keras_dist. Received: {others} from {self._kind} "
                        f"{number} on {host}, and {facts} from the first one."
                    )
            ids = [member[1] for member in members]
            ways = [member[3] for member in members if not is_loopback(member[3])]
            found = combine([member[4] for member in members])
            return {**found, "ids": ids, "ways": ways}

        result = self.gather("join", own, check, look)
        if own[1] not in result["ids"]:
            raise ValueError(
                f"The job has all its {self._kind}s. Received: one more, with the "
                f"number {self._number}. Give each of them a number of its own."
            )
        if is_loopback(self._addresses[0]) and result["ways"]:
            # As others see the first one.
            self._addresses = result["ways"][0], self._addresses[1]
        return result

    def rank_variables(self, start: int = 0) -> dict[str, str]:
        """Return the variables by which ranks of this host find all of a start."""
        here, first = self._addresses
        return {
            **store_variables(first, self._port, self._secret, start=start),
            **interface_variables(here),
            SECRET: derive_secret(self._secret, f"ranks {self.nonce} {start}"),
        }

    def gather(
        self,
        name: str,
        value: Any,
        combine: Combine,
        look: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return what the first member makes of the values of all.

        Args:
            name: Name of the values, another one for each call.
            value: Value of this member, of JSON.
            combine: Makes the result of all values, on the first member. The value of
                a member that was lost is `None`.
            look: Is called while this member waits.

        Raises:
            ValueError: If `combine` has raised an error that says what to do, or the
                first member was lost.
        """
        self._is_gathering = True
        self._give(name, value)
        if self._number == 0:
            try:
                while self._find_missing(name):
                    look()
                    time.sleep(_TICK)
                found = combine([note.get(name) for note in self._notes])
            except (OSError, RuntimeError, ValueError) as error:
                found = {"error": str(error)}
            self._give(f"all.{name}", found)
        while (result := self._notes[0].get(f"all.{name}")) is None:
            if 0 in self.lost:
                raise ValueError(
                    f"The first {self._kind} was lost, and the job ends with it. "
                    f"Received: no answer from {self._meeting} for "
                    f"{self._lost_seconds:g} s. If its own output shows no cause, "
                    "start the job again; with `resume=` it continues."
                )
            look()
            time.sleep(_TICK)
        self._is_gathering = False
        if "error" in result:
            raise ValueError(result["error"])
        return dict(result)

    def _find_missing(self, name: str) -> set[int]:
        """Return the members for whose values the first one waits."""
        absent = {k for k, note in enumerate(self._notes) if name not in note}
        return absent | set(self.lost) if name == "join" else absent - set(self.lost)

    def _give(self, name: str, value: Any) -> None:
        """Add a value to the note of this member."""
        self._notes[self._number] = {**self._notes[self._number], name: value}
        self._has_more.set()

    def _keep_in_touch(self) -> None:
        """Write this member's note and read all notes, until the meeting is over."""
        before, prefix = time.monotonic(), f"{self.nonce}."
        for beat in itertools.count(1):
            note = {**self._notes[self._number], "signals": [*self._stopped]}
            name, note["beat"] = f"{prefix}{self._number}", beat
            is_there = self._client.put(name, note)
            found = self._client.get_all(prefix) if is_there else None
            now = time.monotonic()
            self._note(found or {}, now - before)
            before = now
            pause = _TICK if self._is_gathering else _BEAT_SECONDS
            self._has_more.wait(max(pause, self._size / _MOST_BEATS))
            self._has_more.clear()
            if self._is_over.is_set():
                return

    def _note(self, found: Mapping[str, Any], seconds: float) -> None:
        """Note what all have written, so long after the last time."""
        for k, before in enumerate(self._notes):
            if k != self._number:  # this one may be suspended
                note = found.get(f"{self.nonce}.{k}", before) or {}
                is_new = note.get("beat") != before.get("beat")
                self._silent[k] = 0.0 if is_new else self._silent[k] + seconds
                self._notes[k] = note
