"""With ssh: which hosts there are now, by a list or by a script that names them."""

import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from keras_dist.launch.elastic import LeftOut, taken_back_text
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import check_host, is_here

# Seconds between two looks, and for a script or a connection to answer.
_LOOK_SECONDS, _SCRIPT_SECONDS, _SSH_SECONDS = 5.0, 30.0, 15.0

# Seconds for which a start waits for a host whose agent has ended.
_ANSWER_SECONDS = 3.0

# How many hosts are connected to at once.
_AT_ONCE = 32


def named_by(script: str, slots: int | None) -> Callable[[], dict[str, int]]:
    """A function that runs a host discovery script, as `horovodrun` has it.

    Args:
        script: The command. It prints a line `HOST:SLOTS` for each host that is there.
        slots: Slots of a host whose line has none.

    Returns:
        A function that returns the slots of each host. It raises `ValueError` if the
        script fails, or prints something else.
    """

    def named() -> dict[str, int]:
        words = shlex.split(script)
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SCRIPT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"The host discovery script failed. {error}") from error
        if done.returncode:
            raise ValueError(
                f"The host discovery script failed. Received: {script} ended with exit "
                f"code {done.returncode}. {done.stderr.strip()[-200:]}"
            )
        return hosts_of_lines(done.stdout, slots)

    return named


def hosts_of_lines(text: str, slots: int | None = None) -> dict[str, int]:
    """The hosts that a host discovery script has printed, with their slots.

    >>> hosts_of_lines("a:2\\n\\nb\\n", 4)
    {'a': 2, 'b': 4}

    Raises:
        ValueError: If a line has another form, or a name that no host has.
    """
    hosts = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, has_slots, count = line.rpartition(":")
        if not has_slots and slots is not None:
            name, count = line, str(slots)
        if not name or not count.isdecimal() or " " in name:
            raise ValueError(
                "The host discovery script must print a line HOST:SLOTS for each host, "
                f"or HOST alone with `-np`. Received: {line!r}"
            )
        check_host(name, source="the output of the host discovery script")
        if int(count):
            hosts[name] = int(count)
    return hosts


class Discovery(threading.Thread):
    """Looks every few seconds which hosts are named and can be reached.

    Args:
        named: Returns the slots of each host that is named now.
        ssh: The command and options of ssh.
    """

    def __init__(
        self, named: Callable[[], Mapping[str, int]], ssh: Sequence[str]
    ) -> None:
        super().__init__(name="keras_dist.discovery", daemon=True)
        self.left_out = LeftOut()
        self._named, self._ssh = named, ssh
        self._lock, self._at_once = threading.Lock(), threading.Event()
        # Slots of the hosts that are named, and those that could be reached, each with
        # the moment when it came.
        self._hosts: dict[str, int] = {}
        self._reached: dict[str, float] = {}
        self._error, self._lost_at = "", 0.0

    def run(self) -> None:
        while True:
            self.look()
            self._at_once.wait(_LOOK_SECONDS)
            self._at_once.clear()

    def look(self) -> None:
        """Ask which hosts are named, and connect to those that are new or were lost."""
        begin = time.monotonic()
        try:
            hosts, error = dict(self._named()), ""
        except ValueError as problem:
            hosts, error = self._hosts, str(problem)
        if error and error != self._error:
            print_message(f"keras-dist: {error} The hosts stay those of before.")
        self._error = error
        new = [host for host in hosts if host not in self._reached]
        with ThreadPoolExecutor(_AT_ONCE) as executor:
            answers = list(executor.map(self._answers, new))
        with self._lock:
            self._hosts = hosts
            for host in set(self._reached) - set(hosts):
                del self._reached[host]
            for host, has_answered in zip(new, answers, strict=True):
                if has_answered:
                    self._reached[host] = time.monotonic()
            if begin > self._lost_at:
                self._lost_at = 0.0

    def lose(self, hosts: Sequence[str]) -> None:
        """These hosts take part again when they have been reached again."""
        with self._lock:
            for host in hosts:
                self._reached.pop(host, None)
            self._lost_at = time.monotonic()
        self._at_once.set()

    def take_back(self) -> None:
        """Let a host that is left out take part again, if one can be reached."""
        with self._lock:
            host = self.left_out.take_back(h for h in self._hosts if h in self._reached)
        if host:
            print_message(taken_back_text(host))

    def is_asking(self) -> bool:
        """Whether hosts that were lost just now may soon be reached again."""
        with self._lock:
            return time.monotonic() - self._lost_at < _ANSWER_SECONDS

    def available(self) -> tuple[dict[str, int], float]:
        """Slots of the hosts that may take part, and when the last one of them came."""
        with self._lock:
            hosts = {
                host: slots
                for host, slots in self._hosts.items()
                if host in self._reached and not self.left_out.seconds(host)
            }
            return hosts, max((self._reached[host] for host in hosts), default=0.0)

    def missing(self) -> str:
        """The hosts that are named and may not take part, in words."""
        there, _ = self.available()
        with self._lock:
            named = []
            for host in self._hosts:
                left = self.left_out.seconds(host)
                if host not in there:
                    why = f"left out for {left:.0f} s" if left else "not reached by ssh"
                    named.append(f"{host}, {why}")
        return "; ".join(filter(None, [*named, self._error]))

    def _answers(self, host: str) -> bool:
        """Whether a command can be run on a host."""
        if is_here(host):
            return True
        try:
            done = subprocess.run(
                [*self._ssh, "--", host, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SSH_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0
