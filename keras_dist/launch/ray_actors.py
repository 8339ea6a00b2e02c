"""Actors of a Ray cluster, in which ranks call a function."""

import importlib
from collections.abc import Mapping
from typing import Any

from keras_dist.launch.call_agent import runner
from keras_dist.launch.call_errors import cause_in
from keras_dist.launch.calls import Calls
from keras_dist.launch.hosts import slots_of_workers
from keras_dist.launch.ray_workers import Growth, Workers

_TICK = 0.5


def _rank_class() -> type:
    """The class of the actors, which is pickled by value as it is in a function."""

    class Rank:
        def run(self, run_agent: Any, header: Any, call: bytes) -> bytes:
            return run_agent(header, call)

    return Rank


def run_actors(
    ray: Any, group: Any, workers: Workers, calls: Calls, hosts: list[str]
) -> list[Any]:
    """Run all actors to their end; return what each rank returned.

    Args:
        ray: The module.
        group: The placement group, with a bundle for each worker.
        workers: What they need.
        calls: What they call.
        hosts: Of `hosts_of_group`.
    """
    call, header, run_agent = ray.put(calls.call), calls.header(), runner()
    actors = _actors(ray, group, workers.bundle)
    growth = Growth(ray, workers, len(hosts))
    try:
        pending = {}
        for worker, (slot, actor) in enumerate(
            zip(slots_of_workers(hosts), actors, strict=True)
        ):
            own = {**header, "hosts": hosts, "worker": worker}
            pending[actor.run.remote(run_agent, own, call)] = slot.rank
        return calls.results(_answers(ray, pending, calls, growth))
    finally:
        growth.close()
        calls.stop()
        for actor in actors:
            ray.kill(actor)


def hosts_of_group(ray: Any, group: Any) -> list[str]:
    """A name for the node of each bundle: its address."""
    bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = [bundles[number] for number in range(len(bundles))]
    # Several nodes on one machine are hosts of their own.
    is_shared = len({addresses[node] for node in nodes}) < len(set(nodes))
    return [f"{addresses[n]}-{n[:8]}" if is_shared else addresses[n] for n in nodes]


def _actors(ray: Any, group: Any, bundle: Mapping[str, float]) -> list[Any]:
    """An actor in each bundle of the group."""
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


def _answers(
    ray: Any, pending: dict[Any, int], calls: Calls, growth: Growth
) -> list[bytes]:
    """What the agents have answered, until all have, or one is lost."""
    answers = []
    while pending and not calls.is_overdue:
        ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_TICK)
        for reference in ready:
            rank = pending.pop(reference)
            try:
                answers.append(ray.get(reference))
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                ended = rank, f"has ended ({type(error).__name__}: {reason})"
                calls.lose(*(cause_in(str(error)) or ended))
        calls.look()
        if not calls.is_stopping and growth.is_there():
            calls.save()
    return answers
