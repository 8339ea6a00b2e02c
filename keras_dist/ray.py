"""Call a function on many ranks of a Ray cluster: `keras_dist.ray.run`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist.launch.call_agent import runner
from keras_dist.launch.call_errors import cause_in
from keras_dist.launch.calls import Calls
from keras_dist.launch.hosts import slots_of_workers

_SYSTEM = "Ray actor"
_TICK = 0.5


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout: float = 300.0,
) -> list[Any]:
    """Call `function` on ranks of a Ray cluster; return what each one returned.

    Each rank has an actor of its own, in one placement group. It is a process that the
    actor starts, so the objects of Ray are not there: pass values, not references.
    When it is over, actors, processes and placement group are gone.

    Needs Ray (`pip install keras_dist[ray]`), and keras_dist with its Horovod on all
    nodes. Connects to a cluster by `ray.init()` if that has not been called. The
    calling process runs on a node of the cluster, as a job of `ray job submit` does.

    Args:
        function: The function that every rank calls. A function of a notebook or script
            is copied to the ranks by value, one of a module is imported there by name.
        args, kwargs: Arguments of the function, the same on every rank.
        num_workers: Number of ranks.
        use_gpu: Whether each rank has a GPU of its own.
        resources_per_worker: Resources of each rank, by Ray's names; by default
            `{"CPU": 1}`, and with `use_gpu` `{"CPU": 1, "GPU": 1}`. TensorFlow uses as
            many threads as there are CPUs.
        start_timeout: Seconds to wait until the cluster has these resources.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        Exception: The error of the rank that failed first. Its cause is a
            `RuntimeError` with the traceback on that rank, and what the others did.
        ImportError: If Ray is not installed.
        RuntimeError: If a rank or its actor was killed, or a node was lost.
        TimeoutError: If the cluster has not got the resources in time.
        ValueError: If `num_workers` is too small.

    Example:

        losses = keras_dist.ray.run(train, args=[1e-3], num_workers=4)
    """
    if num_workers < 1:
        raise ValueError(f"At least one worker is needed. Received: {num_workers=}")
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "The ranks have to reach the process that calls `keras_dist.ray.run`. "
            "Received: a connection of Ray Client (ray://…). Call it on a node of the "
            "cluster: in a job of `ray job submit`, or in a remote function."
        )
    resources = {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {})}
    bundle = {**resources, **(resources_per_worker or {})}
    group = ray.util.placement_group([bundle] * num_workers, strategy="PACK")
    try:
        _wait_for(ray, group, start_timeout)
        calls = Calls(
            function,
            args,
            kwargs,
            size=num_workers,
            address=ray.util.get_node_ip_address(),
            system=_SYSTEM,
        )
        try:
            return _run(ray, group, bundle, calls)
        finally:
            calls.close()
    finally:
        ray.util.remove_placement_group(group)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            f"keras_dist.ray needs Ray. Received: {error}. "
            "Run: pip install 'keras_dist[ray]'"
        ) from error


def _wait_for(ray: Any, group: Any, seconds: float) -> None:
    """Wait until the placement group is there."""
    if not group.wait(seconds):
        needed = group.bundle_specs
        raise TimeoutError(
            f"The cluster has not got the resources of {len(needed)} workers within "
            f"{seconds:g} s. Received: {needed[0]} each, in a cluster of "
            f"{_numbers(ray.cluster_resources())}, of which "
            f"{_numbers(ray.available_resources())} are free. Start fewer workers, or "
            "add nodes."
        )


def _numbers(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


def _rank_class() -> type:
    """The class of the actors, which is pickled by value as it is in a function."""

    class Rank:
        def run(self, run_agent: Any, header: Any, call: bytes) -> bytes:
            return run_agent(header, call)

    return Rank


def _run(ray: Any, group: Any, bundle: Mapping[str, float], calls: Calls) -> list[Any]:
    """Run all actors to their end; return what each rank returned."""
    hosts = _hosts(ray, group)
    call, header, run_agent = ray.put(calls.call), calls.header(), runner()
    actors = _actors(ray, group, bundle)
    try:
        pending = {}
        for worker, (slot, actor) in enumerate(
            zip(slots_of_workers(hosts), actors, strict=True)
        ):
            own = {**header, "hosts": hosts, "worker": worker}
            pending[actor.run.remote(run_agent, own, call)] = slot.rank
        return calls.results(_answers(ray, pending, calls))
    finally:
        calls.stop()
        for actor in actors:
            ray.kill(actor)


def _hosts(ray: Any, group: Any) -> list[str]:
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


def _answers(ray: Any, pending: dict[Any, int], calls: Calls) -> list[bytes]:
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
    return answers
