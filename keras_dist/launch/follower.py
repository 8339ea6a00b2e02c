"""On each host of a rendezvous: come, and follow the orders of the first host."""

import dataclasses
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from keras_dist.launch import horovod_library
from keras_dist.launch.assignment import Assignment
from keras_dist.launch.failures import print_message
from keras_dist.launch.host_store import HostStore, wait_for
from keras_dist.launch.hosts import Slot
from keras_dist.launch.members import Member
from keras_dist.launch.orders import Orders
from keras_dist.launch.own_name import check_own_name
from keras_dist.launch.ranks import Command
from keras_dist.launch.rendezvous import secret_of_start, variables_of
from keras_dist.launch.reports import Report, run_ranks
from keras_dist.launch.spares import Spares

# Seconds between two looks at the orders, and between two lines while it waits.
_LOOK_SECONDS, _SAY_SECONDS = 0.5, 15.0


class Follower:
    """A host that takes part in a job.

    Args:
        store: The store of the job, as this host reaches it.
        secret: Secret of the job.
        member: This host.
        is_first: Whether this process has the store.
        timeout: Seconds to wait for the first host, and for the first start; but not
            for a start of a job whose hosts come and go.
        stopped: Numbers of the signals that this process has received.
        spares: As of `Ranks`.
    """

    def __init__(
        self,
        store: HostStore,
        secret: str,
        member: Member,
        *,
        is_first: bool,
        timeout: float,
        stopped: list[int],
        spares: Spares | None = None,
    ) -> None:
        self.name = secrets.token_hex(8)
        self._orders = Orders(store, self.name)
        self._store, self._secret, self._member = store, secret, member
        self._is_first, self._timeout, self._stopped = is_first, timeout, stopped
        self._spares = spares
        # Addresses of this host, and of the first one as it is reached from here.
        self._address = self._reached = ""

    def join(self) -> bool:
        """Come to the rendezvous; whether this process was not stopped before.

        Raises:
            ValueError: If the store cannot be reached, or refuses the secret.
        """
        found = wait_for(
            self._store,
            self._member.host,
            timeout=self._timeout,
            stopped=self._stopped,
        )
        if found is None:
            return False
        self._address, self._reached = found
        self._orders.begin()
        member = dataclasses.replace(self._member, reached=self._reached)
        self._orders.answer("join", dataclasses.asdict(member))
        return True

    def follow(self, command: Command, job: str) -> int:
        """Do what the first host orders, to the end of the job.

        Args:
            command: The command that the ranks run.
            job: Id of the processes that this host starts.

        Returns:
            The exit code of the job.

        Raises:
            ValueError: If the first host is lost, or has no use for this host.
        """
        begin, last, said = time.monotonic(), -1, ""
        while True:
            order = self._orders.now()
            if order.get("do") == "exit":
                if order["text"]:
                    print_message(order["text"])
                self._store.put(f"left.{self.name}", True)
                return int(order["code"])
            if order.get("do") == "wait":
                if order["text"] != said:
                    said = order["text"]
                    print_message(said)
            elif order and order["start"] != last:
                last = order["start"]
                # Another host may have failed before this one has seen the start.
                is_run = order["do"] == "run"
                report = self._run(order, command, job) if is_run else Report()
                self._orders.answer(f"report.{last}", report.values())
            self._orders.check()
            if last < 0:
                self._check_needed(time.monotonic() - begin)
            self._forward_stop()
            if self._stopped and last < 0 and not self._is_first:
                self._store.put(f"left.{self.name}", True)
                return 128 + self._stopped[0]  # nobody waits for this host
            time.sleep(_LOOK_SECONDS)

    def _check_needed(self, seconds: float) -> None:
        """Raise if this host has waited for its first start in vain."""
        # The first host says who is missing, before. Where hosts come and go, one may
        # wait for as long as the job.
        is_late = seconds > self._timeout + _SAY_SECONDS
        if is_late and not self._member.is_elastic:
            raise ValueError(
                "The job has all its hosts. Received: one more, "
                f"{self._member.host}, which was not needed for {seconds:.0f} s."
            )

    def _run(self, order: Mapping[str, Any], command: Command, job: str) -> Report:
        """Run this host's ranks; they end by an order, too."""
        secret = secret_of_start(self._secret, order["nonce"], order["start"])
        own = self._address
        if own.startswith("127.") and order["reached"]:
            own = order["reached"]  # as the others see this host
        assignment = Assignment(
            slots=[Slot(**slot) for slot in order["slots"]],
            store=variables_of(*self._store.near(self._reached), secret),
            secret=secret,
            number=order["number"],
            restart=order["start"],
            seed=order["seed"],
        )
        if self._spares is not None:
            self._spares.is_start_near = False  # it is here
        stops: list[int] = []
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=[stops, is_over], daemon=True)
        watch.start()
        try:
            if not horovod_library.uses_named_network():
                check_own_name(own)
            return run_ranks(
                command,
                assignment,
                job,
                address=own,
                stopped=stops,
                spares=self._spares,
            )
        except (OSError, RuntimeError, ValueError) as error:
            return Report(error=str(error))
        finally:
            is_over.set()
            watch.join()

    def _watch(self, stops: list[int], is_over: threading.Event) -> None:
        """Stop the ranks at an order, a signal, or when the first host is lost."""
        while not (stops or is_over.wait(_LOOK_SECONDS)):
            order = self._orders.now() or {"do": "run"}
            self._forward_stop()
            if self._stopped:
                stops.append(self._stopped[0])
            elif order["do"] == "run" and self._spares is not None:
                self._spares.is_start_near = order.get("is_start_near", False)
            elif order["do"] == "save":
                stops.append(signal.SIGTERM)
            elif order["do"] != "run" or self._orders.is_over:
                stops.append(signal.SIGHUP)

    def _forward_stop(self) -> None:
        """Let the first host know of a signal, which ends the job on all hosts."""
        if self._stopped:
            self._store.put(f"stopped.{self.name}", self._stopped[0])
