"""Start and end of Horovod, ranks and sizes, what Horovod was built with, and `run`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from keras_dist import comm as collectives
from keras_dist.horovod.process_sets import ProcessSet, made
from keras_dist.launch import function

Result = TypeVar("Result")


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Connect to the other ranks.

    Args:
        comm: Only `None`, for all ranks.
        process_sets: Groups of ranks to make, or `"dynamic"`: `add_process_set` can
            make them later.

    Raises:
        ValueError: If `comm` is given, or a group cannot be made.
    """
    ranks = list(comm) if isinstance(comm, Iterable) else comm
    if ranks is not None and ranks != list(range(collectives.size())):
        raise ValueError(
            "keras_dist.horovod connects all ranks that the launcher started. "
            f"Received: comm={comm!r}. Pass groups of ranks as `process_sets`."
        )
    if isinstance(process_sets, str) or not process_sets:
        if process_sets:
            collectives.start_with_process_sets()
        collectives.start(may_be_elastic=True)
        return
    groups = [process_set.members() for process_set in process_sets]
    collectives.init(process_sets=groups)
    made(process_sets)


def shutdown() -> None:
    """End the connection to the other ranks, at the end of the script."""
    collectives.stop()
    collectives.forget_process_sets()


def is_initialized() -> bool:
    """Tell whether `init` was called, or anything that calls it."""
    return collectives.is_started()


def rank() -> int:
    """Number of this process, from 0 to `size()` − 1."""
    return collectives.rank()


def size() -> int:
    """Number of ranks."""
    return collectives.size()


def local_rank() -> int:
    """Number of this process on its host."""
    return collectives.local_rank()


def local_size() -> int:
    """Number of ranks on this host."""
    return collectives.local_size()


def cross_rank() -> int:
    """Number of this host among those that have a rank of this local rank."""
    return int(collectives.fact("cross_rank", 0))


def cross_size() -> int:
    """Number of hosts that have a rank of this local rank."""
    return int(collectives.fact("cross_size", 1))


def is_homogeneous() -> bool:
    """Tell whether all hosts have the same number of ranks."""
    return bool(collectives.fact("is_homogeneous", True))


def mpi_threads_supported() -> bool:
    """Tell whether MPI can be called by several threads."""
    return mpi_enabled() and bool(collectives.fact("mpi_threads_supported", False))


def mpi_enabled() -> bool:
    """Tell whether the ranks communicate over MPI."""
    return bool(collectives.fact("mpi_enabled", False))


def gloo_enabled() -> bool:
    """Tell whether the ranks communicate over Gloo."""
    return bool(collectives.fact("gloo_enabled", False))


def mpi_built() -> bool:
    """Tell whether Horovod was built with MPI."""
    return bool(collectives.fact("mpi_built", False))


def gloo_built() -> bool:
    """Tell whether Horovod was built with Gloo."""
    return bool(collectives.fact("gloo_built", False))


def nccl_built() -> int:
    """Return the version of NCCL that Horovod was built with, 0 for none."""
    return int(collectives.fact("nccl_built", 0))


def ddl_built() -> bool:
    """Tell whether Horovod was built with IBM's DDL."""
    return bool(collectives.fact("ddl_built", False))


def ccl_built() -> bool:
    """Tell whether Horovod was built with Intel's oneCCL."""
    return bool(collectives.fact("ccl_built", False))


def cuda_built() -> bool:
    """Tell whether Horovod was built with CUDA."""
    return bool(collectives.fact("cuda_built", False))


def rocm_built() -> bool:
    """Tell whether Horovod was built with ROCm."""
    return bool(collectives.fact("rocm_built", False))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record Horovod's timeline, on all ranks; the first one writes the file.

    Args:
        file_path: The file.
        mark_cycles: Taken for scripts that pass it; cycles are not marked.

    Raises:
        ValueError: If Horovod was not started with `HOROVOD_TIMELINE=DYNAMIC`.
    """
    collectives.start_timeline(file_path)


def stop_timeline() -> None:
    """End the timeline."""
    collectives.stop_timeline()


def run(
    func: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Result]:
    """Call `func` on ranks of this host, and return what each one returned.

    Args:
        func: The function.
        args, kwargs: Its arguments.
        num_proc, np: Number of ranks.
        min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit, cooldown_range,
            host_discovery_script: Not taken: the ranks are those of the start.
        hosts, hostfile, ssh_port, ssh_identity_file, executable, use_mpi, mpi_args: Not
            taken: for other hosts there is `keras-dist run -H`.
        output_filename: Folder for a log file of each rank.
        start_timeout, disable_cache, verbose, use_gloo, network_interface,
            network_interfaces: Not needed.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        ValueError: If an argument is given that is not taken.
        RuntimeError: If a rank failed.

    Example:

        losses = hvd.run(train, args=[1e-3], np=4)
    """
    refused = {
        "min_num_proc": min_num_proc or min_np,
        "max_num_proc": max_num_proc or max_np,
        "host_discovery_script": host_discovery_script,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "hosts": None if _is_here(hosts) else hosts,
        "hostfile": hostfile,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "executable": executable,
        "use_mpi": use_mpi,
        "mpi_args": mpi_args,
    }
    given = {name: value for name, value in refused.items() if value}
    if given:
        raise ValueError(
            "keras_dist.horovod.run starts a fixed number of ranks on this host. "
            f"Received: {given}. Use `keras-dist run` or `horovodrun` for more."
        )
    ranks = np or num_proc
    return function.run(func, args, kwargs, np=ranks, log_dir=output_filename)


def _is_here(hosts: str | None) -> bool:
    names = [entry.partition(":")[0] for entry in (hosts or "").split(",")]
    return set(names) <= {"", "localhost", "127.0.0.1"}
