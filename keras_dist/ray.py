"""Call a function on many ranks of a Ray cluster: `keras_dist.ray.run`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from keras_dist.launch.calls import run_calls
from keras_dist.launch.coordinator import Plan
from keras_dist.launch.function import pickled_call
from keras_dist.launch.ray_actors import Need, RayActors
from keras_dist.launch.restarts import RESTARTS

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    min_workers: int | None = None,
    max_restarts: int | None = None,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout: float = 300.0,
) -> list[Result]:
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
        num_workers: Number of ranks; with `min_workers`, at most.
        min_workers: The smallest number of ranks. With it a job goes on when a node or
            rank is lost, and takes more nodes when they come: its ranks are started
            again, as many as the cluster has resources for, and call the function anew.
            With `dist_fit(…, resume=…)` they train on from the last checkpoint.
        max_restarts: How often the ranks are started again after a failure; by default
            not, and with `min_workers` three times.
        use_gpu: Whether each rank has a GPU of its own.
        resources_per_worker: Resources of each rank, by Ray's names; by default
            `{"CPU": 1}`, and with `use_gpu` `{"CPU": 1, "GPU": 1}`. TensorFlow uses as
            many threads as there are CPUs.
        start_timeout: Seconds to wait until the cluster has these resources.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        Exception: The error of the rank that failed first, in the last start. Its cause
            is a `RuntimeError` with the traceback on that rank, and what the others
            did.
        ImportError: If Ray is not installed.
        RuntimeError: If a rank or its actor was killed, or a node was lost.
        TimeoutError: If the cluster has not got the resources in time.
        ValueError: If a number cannot be used.

    Example:

        losses = keras_dist.ray.run(train, args=[1e-3], num_workers=4)
    """
    least = num_workers if min_workers is None else min_workers
    if max_restarts is None:
        max_restarts = 0 if min_workers is None else RESTARTS
    if not 1 <= least <= num_workers or max_restarts < 0:
        raise ValueError(
            "At least one worker is needed, and no negative number of restarts. "
            f"Received: {num_workers=}, {min_workers=}, {max_restarts=}"
        )
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
    need = Need(bundle, least, num_workers, start_timeout)
    plan = Plan(
        num_hosts=num_workers,
        min_hosts=least,
        restarts=max_restarts,
        timeout=start_timeout,
        is_announced=True,
        is_raised=True,
    )
    call = pickled_call(function, args, kwargs)
    address = ray.util.get_node_ip_address()
    return run_calls(RayActors(ray, need, call), plan, address)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            f"keras_dist.ray needs Ray. Received: {error}. "
            "Run: pip install 'keras_dist[ray]'"
        ) from error
