"""Actors of a Ray cluster, in which ranks call a function; and how many fit."""

import importlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from keras_dist.launch.call_agent import runner
from keras_dist.launch.calls import Workers, cause_in
from keras_dist.launch.hosts import Member
from keras_dist.launch.restarts import SETTLE_SECONDS

# Seconds in which a cluster makes a group for which it has resources.
_RESERVE_SECONDS = 2.0

# Seconds in which the agent of each actor has to join the job.
_AGENT_SECONDS = 120.0


@dataclass(frozen=True)
class Need:
    """What the ranks of a job need of the cluster.

    Args:
        bundle: Resources of each worker, by Ray's names.
        least, most: How many workers at least, and at most.
        timeout: Seconds to wait for the resources of the least.
    """

    bundle: Mapping[str, float]
    least: int
    most: int
    timeout: float

    def reserve(self, ray: Any) -> Any:
        """Make the placement group of as many workers as the cluster can take.

        Where there are enough but not all, it waits some seconds for the others.

        Raises:
            TimeoutError: If too few are there.
        """
        end = time.monotonic() + self.timeout
        seconds = self.timeout if self.least == self.most else SETTLE_SECONDS
        while True:
            for count in self._counts(ray):
                left = max(0.0, end - time.monotonic())
                group = self._group(ray, count, min(seconds, left))
                if group is not None:
                    return group
                seconds = _RESERVE_SECONDS
            if time.monotonic() >= end:
                raise TimeoutError(self._missing(ray))

    def one_more(self, ray: Any) -> Any:
        """Ask for the resources of another worker; a cluster may grow by that."""
        return ray.util.placement_group([dict(self.bundle)])

    def _counts(self, ray: Any) -> list[int]:
        """Numbers of workers to try: all, and what the sums of resources allow."""
        free = ray.available_resources()
        wanted = {name: value for name, value in self.bundle.items() if value}
        fits = [int(free.get(name, 0.0) / value) for name, value in wanted.items()]
        most = min([self.most - 1, *fits])
        return [self.most, *range(most, self.least - 1, -1)]

    def _group(self, ray: Any, count: int, seconds: float) -> Any:
        group = ray.util.placement_group([dict(self.bundle)] * count, strategy="PACK")
        if group.wait(seconds):
            return group
        ray.util.remove_placement_group(group)
        return None

    def _missing(self, ray: Any) -> str:
        return (
            f"The cluster has not got the resources of {self.least} workers within "
            f"{self.timeout:g} s. Received: {dict(self.bundle)} each, in a cluster of "
            f"{_numbers(ray.cluster_resources())}, of which "
            f"{_numbers(ray.available_resources())} are free. Start fewer workers, or "
            "add nodes."
        )


def _numbers(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


class Growth:
    """Whether the cluster has room for another worker, while fewer than all run.

    Args:
        ray: The module.
        need: What the ranks need.
        size: How many run.
    """

    def __init__(self, ray: Any, need: "Need", size: int) -> None:
        self._ray = ray
        self._group = need.one_more(ray) if size < need.most else None
        self._since: float | None = None

    def is_there(self) -> bool:
        """Return whether it has had it for some seconds: others may come with it."""
        if self._group is None:
            return False
        if self._since is None and self._is_made():
            self._since = time.monotonic()
        return self._since is not None and (
            time.monotonic() - self._since > SETTLE_SECONDS
        )

    def _is_made(self) -> bool:
        # Its own `wait` counts whole seconds.
        table = self._ray.util.placement_group_table(self._group)
        return table.get("state") == "CREATED"

    def close(self) -> None:
        """Give the resources back."""
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


def _rank_class() -> type:
    """Return the class of the actors, pickled by value as it is in a function."""

    class Rank:
        def run(self, run_agent: Any, header: Any, call: bytes) -> bytes:
            return run_agent(header, call)

    return Rank


class RayActors(Workers):
    """Actors of a Ray cluster, in a placement group of their own for each start.

    Args:
        ray: The module.
        need: What the ranks need of the cluster.
        call: What they call.
    """

    def __init__(self, ray: Any, need: "Need", call: bytes) -> None:
        super().__init__("Ray actor")
        self._ray, self._need, self._call = ray, need, ray.put(call)
        self._group: Any = None
        self._growth: Growth | None = None
        self._actors: list[Any] = []
        self._pending: dict[Any, str] = {}  # agents by the answers that are to come
        self._begun = 0.0

    def begin_wait(self) -> None:
        """Start an actor for each worker for which the cluster has resources."""
        self.close()
        self._group = self._need.reserve(self._ray)
        hosts = hosts_of_group(self._ray, self._group)
        headers = self.begin(hosts, number=len(hosts))
        self._actors = _actors(self._ray, self._group, self._need.bundle)
        self._growth = Growth(self._ray, self._need, len(hosts))
        self._begun = time.monotonic()
        run_agent = runner()
        for actor, header in zip(self._actors, headers, strict=True):
            answer = actor.run.remote(run_agent, header, self._call)
            self._pending[answer] = header["name"]

    def poll(self, seconds: float) -> None:
        if not self._pending:
            time.sleep(seconds)
            return
        all_ = list(self._pending)
        ready, _ = self._ray.wait(all_, num_returns=len(all_), timeout=seconds)
        for reference in ready:
            name = self._pending.pop(reference)
            try:
                self.take(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                ended = f"has ended ({type(error).__name__}: {reason})"
                found = cause_in(str(error))
                self.note_lost(name, found[1] if found else ended)

    def look(self, joined: Collection[str], *, is_between_starts: bool) -> None:
        super().look(joined, is_between_starts=is_between_starts)
        if time.monotonic() - self._begun > _AGENT_SECONDS:
            for name in self._pending.values():
                if name not in self._joined:
                    self.note_lost(name, f"has no agent after {_AGENT_SECONDS:g} s")

    def is_running(self) -> bool:
        return bool(self._pending)

    def changes(self, members: Mapping[str, Member]) -> list[str]:
        has_room = self._growth is not None and self._growth.is_there()
        return ["another worker fits"] if has_room else []

    def close(self) -> None:
        """End all actors, and give their resources back."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._growth is not None:
            self._growth.close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._pending = [], {}
        self._growth = self._group = None


def hosts_of_group(ray: Any, group: Any) -> list[str]:
    """Return a name for the node of each bundle: its address."""
    bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = [bundles[number] for number in range(len(bundles))]
    # Several nodes on one machine are hosts of their own.
    is_shared = len({addresses[node] for node in nodes}) < len(set(nodes))
    return [f"{addresses[n]}-{n[:8]}" if is_shared else addresses[n] for n in nodes]


def _actors(ray: Any, group: Any, bundle: Mapping[str, float]) -> list[Any]:
    """Return an actor in each bundle of the group."""
    scheduling = importlib.import_module("ray.util.scheduling_strategies")
    named = ("CPU", "GPU", "memory")
    options = ray.remote(_rank_class()).options
    return [
        options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            resources={k: v for k, v in bundle.items() if k not in named},
            max_restarts=0,
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        ).remote()
        for number in range(len(group.bundle_specs))
    ]
