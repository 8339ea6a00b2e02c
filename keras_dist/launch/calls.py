"""A function that ranks call which another system has started: Ray or Spark.

Here is the driver's side: `Workers`, the starter of such a job, and what the caller
gets. `call_agent` is the side of the workers, one for each rank.
"""

import contextlib
import json
import pickle
import re
import secrets
import socket
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from keras_dist.launch.agent import Header
from keras_dist.launch.coordinator import Coordinator, End, Plan
from keras_dist.launch.hosts import Member, nnodes_text
from keras_dist.launch.joined import JoinedHosts, Starter
from keras_dist.launch.ranks import Command
from keras_dist.launch.restarts import NNODES
from keras_dist.launch.store import Store

# What `run_agent` raises behind the name of its agent.
LOST_AGENT = "has lost its agent"
NO_PACKAGE = "has no keras_dist in its Python"
_FOUND = re.compile(rf"agent (\w+) ({LOST_AGENT}|{NO_PACKAGE}, \S+)")

# Seconds in which agents answer whose ranks have ended; and between two looks for that.
_ANSWER_SECONDS, _TICK = 20.0, 0.2


@dataclass(frozen=True)
class Answer:
    """What an agent has answered.

    Args:
        problem: Why it could not run its rank; empty if it did.
        outcome: What the rank returned, or else its error, pickled; or nothing.
    """

    problem: str
    outcome: bytes


class Workers(Starter):
    """The workers of a job: actors or tasks, each of which starts an agent.

    Args:
        system: What they are, for messages: "Ray actor" or "Spark task".
    """

    may_exclude = False

    def __init__(self, system: str) -> None:
        self._system = system
        # What each agent has to know, but for its name, host and number.
        self.header: Header | None = None
        # Numbers of the agents of this start, by their ids; and their hosts, by number.
        self._numbers: dict[str, int] = {}
        self._hosts: list[str] = []
        self._over: set[str] = set()  # agents of earlier starts
        self._joined: set[str] = set()
        self.answers: dict[str, Answer] = {}
        # What has happened to actors or tasks that have ended too early.
        self._lost: dict[str, str] = {}

    @abstractmethod
    def poll(self, seconds: float) -> None:
        """Wait for so long, and note answers, and workers that have ended."""

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether there are workers that have not answered."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def begin(self, hosts: Sequence[str], *, number: int) -> list[dict[str, Any]]:
        """Return what the agent of each worker of a start has to know.

        Args:
            hosts: The host of each worker, where it is known.
            number: How many workers there are.
        """
        assert self.header is not None
        self._over |= set(self._numbers)
        self._numbers = {secrets.token_hex(8): k for k in range(number)}
        self._hosts, self._joined = list(hosts), set()
        self.answers, self._lost = {}, {}
        found = []
        for name, worker in self._numbers.items():
            host = hosts[worker] if hosts else ""
            job = f"{self.header.job}_{name}"
            own = replace(self.header, name=name, host=host, number=worker, job=job)
            found.append(asdict(own))
        return found

    def take(self, answer: bytes) -> None:
        """Note what an agent has answered."""
        line, _, outcome = answer.partition(b"\n")
        values = json.loads(line)
        self.answers[values["name"]] = Answer(values["problem"], outcome)

    def lose(self, names: Collection[str]) -> None:
        """Nothing is left to end of agents that do not answer."""

    def note_lost(self, name: str, what: str) -> None:
        """Note that a worker has ended too early; what was known first counts."""
        if name in self._numbers:
            self._lost.setdefault(name, what)

    def note_all_lost(self, reason: str) -> None:
        """Note that the system has ended all workers that have not answered."""
        for name in set(self._numbers) - set(self.answers):
            self.note_lost(name, f"({reason})")

    def cut(self, name: str) -> None:
        self.note_lost(name, "was killed")

    def pause(self, seconds: float) -> None:
        self.poll(seconds)

    def look(self, joined: Collection[str], *, is_between_starts: bool) -> None:
        self._joined |= set(joined) & set(self._numbers)

    def members(self, members: dict[str, Member]) -> dict[str, Member]:
        return {n: member for n, member in members.items() if n in self._numbers}

    def ordered(
        self, members: Mapping[str, Member], plan: Plan, before: Sequence[str | None]
    ) -> list[str | None]:
        return [*sorted(members, key=self._numbers.__getitem__)]

    def waits(self) -> bool:
        return len(self._joined) < len(self._numbers)

    def failed(self) -> End | None:
        for name, answer in self.answers.items():
            rank, host = self._place(name)
            if answer.problem:
                return End(
                    1,
                    "A rank could not be started. "
                    f"Received: rank {rank} on {host}: {answer.problem}",
                )
            if name not in self._joined:
                self.note_lost(name, "has ended")
        for name in self._lost:
            rank, host = self._place(name)
            return End(1, f"keras-dist: {self.ended_text(name, host, [rank], 1)}")
        return None

    def _place(self, name: str) -> tuple[int, str]:
        """Return the number of a worker, and its host if it is known."""
        number = self._numbers[name]
        return number, self._hosts[number] if self._hosts else "an unknown host"

    def ended(self) -> Mapping[str, int]:
        return dict.fromkeys([*self._lost, *self.answers, *self._over], 1)

    def lost_text(
        self, name: str, host: str, ranks: Sequence[int], seconds: float
    ) -> str:
        self.note_lost(name, f"has not responded for {seconds:g} s")
        return self.ended_text(name, host, ranks, 1)

    def ended_text(self, name: str, host: str, ranks: Sequence[int], code: int) -> str:
        what = self._lost.get(name, "has ended")
        if what.startswith("("):  # all of them, by the system itself
            return f"each {self._system} was ended before its rank {what}."
        return f"the {self._system} of rank {ranks[0]} on {host} {what}."


def run_calls(workers: Workers, plan: Plan, address: str) -> list[Any]:
    """Run a job of workers to its end; return what each rank returned.

    Args:
        workers: The workers.
        plan: How many there are, and how often they are started again.
        address: Address or name of this host, by which the workers reach it.

    Raises:
        Exception: The error of the rank that failed first, from a `RuntimeError` with
            its traceback.
        RuntimeError: If a rank, or what started it, has ended without an error.
        ValueError: If the store cannot listen at the address.
    """
    secret = secrets.token_hex(16)
    try:
        address = socket.gethostbyname(address)
        store = Store(address)
    except OSError as error:
        raise ValueError(
            "The workers have to reach the store of the job on the driver's host. "
            f"Received: the address {address}, where it cannot listen ({error})."
        ) from error
    with contextlib.closing(store), contextlib.closing(workers):
        workers.header = Header(
            address=address,
            port=store.port,
            digest="",
            secret=secret,
            name="",
            host="",
            least=plan.least,
            most=plan.num_hosts,
            job=secrets.token_hex(8),
            folder="",
            command=_command(plan),
        )
        hosts = JoinedHosts(store, secret, plan, starter=workers)
        end = Coordinator(hosts, plan).run()
        hosts.send_end(end)
        begin = time.monotonic()
        is_answer_needed = not end.code or end.rank is not None
        while is_answer_needed and workers.is_running():
            if time.monotonic() - begin > _ANSWER_SECONDS:
                break
            workers.poll(_TICK)
        outcomes = {
            rank: workers.answers[name].outcome
            for rank, name in hosts.by_rank.items()
            if name in workers.answers
        }
    if not end.code and not all(outcomes.get(rank) for rank in hosts.by_rank):
        end = End(
            1, "keras-dist: all ranks have returned, but not all agents answered."
        )
    if end.code:
        found = None if end.rank is None else error_in(outcomes.get(end.rank, b""))
        if found is None:
            raise RuntimeError(end.text)
        raise found from RuntimeError(end.text)
    return [pickle.loads(outcomes[rank]) for rank in sorted(outcomes)]


def _command(plan: Plan) -> Command:
    """Return what each rank runs: the agent adds the folder with the call."""
    environment = {}
    if plan.is_elastic:
        environment[NNODES] = nnodes_text(plan.min_hosts, plan.num_hosts)
    return Command("module", ["keras_dist.comm.worker"], environment)


def cause_in(text: str) -> tuple[str, str] | None:
    """Find the agent and the cause that `run_agent` has raised, in a message.

    >>> cause_in("Job aborted: RuntimeError: agent 3f has lost its agent")
    ('3f', 'has lost its agent')
    """
    found = _FOUND.search(text)
    return None if found is None else (found[1], found[2])


def error_in(outcome: bytes) -> Exception | None:
    """Return the error of a rank, if it could be pickled and can be loaded here.

    Args:
        outcome: What the rank has left: its pickled error.
    """
    try:
        error = pickle.loads(outcome)
    except Exception:  # whatever loading an object of the user's raises
        return None
    return error if isinstance(error, Exception) else None
