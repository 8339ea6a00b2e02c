"""`run`: call a function on several ranks, with Horovod's arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_dist import launch


def run(
    func: Callable[..., Any],
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
) -> list[Any]:
    """Call `func` on ranks of this host, and return what each one returned.

    Args:
        func: The function.
        args, kwargs: Its arguments.
        num_proc, np: Number of ranks.
        min_num_proc, max_num_proc, min_np, max_np, slots, reset_limit: Not taken, as
            the arguments that follow: the ranks are those of the start.
        cooldown_range, host_discovery_script: Not taken.
        hosts, hostfile, ssh_port, ssh_identity_file, executable, use_mpi, mpi_args: Not
            taken: for other hosts there is `keras-dist run -H`.
        output_filename: Folder for a log file of each rank.
        start_timeout, disable_cache, verbose, use_gloo: Not needed, as
            network_interface and network_interfaces.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        ValueError: If an argument is given that is not taken.
        RuntimeError: If a rank failed.
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
    return launch.run(func, args, kwargs, np=ranks, log_dir=output_filename)


def _is_here(hosts: str | None) -> bool:
    names = [entry.partition(":")[0] for entry in (hosts or "").split(",")]
    return set(names) <= {"", "localhost", "127.0.0.1"}
