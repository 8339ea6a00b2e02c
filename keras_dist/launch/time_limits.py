"""How long a job waits, in seconds; each limit has an environment variable."""

import os
from dataclasses import dataclass, field

from keras_dist.errors import read_number

STALL = "KERAS_DIST_STALL_SECONDS"


def _read(variable: str, default: float) -> float:
    """Return a field with what the variable holds when the object is made."""

    def read() -> float:
        value = os.environ.get(variable) or default
        return read_number(value, name=variable, unit="seconds")

    return field(default_factory=read)


@dataclass(frozen=True)
class TimeLimits:
    """How long a job waits, as of the environment variables of this process.

    Args:
        stall: Without progress of any rank, until the job ends; 0: no limit.
        first_rank: The same while the first rank runs what others wait for: a callback
            or a block of its own, which may upload a file.
        hosts: For all hosts of `keras-dist run`.
        ranks: For all ranks of a launcher that does not connect them.
        ssh: On a host of `-H`, for the first host.
        lost: Without a sign of a host, until it counts as lost. A shorter outage does
            no harm: what Gloo has sent waits in the kernel.
        save: For the ranks to end, after a signal to the launcher: they may save.
        lock: For the lock of a folder of checkpoints, as for the lease of a dead host.

    Raises:
        ValueError: If a variable holds no number of at least 0.
    """

    stall: float = _read(STALL, 120.0)
    first_rank: float = _read("KERAS_DIST_FIRST_RANK_SECONDS", 3600.0)
    hosts: float = _read("KERAS_DIST_HOSTS_SECONDS", 300.0)
    ranks: float = _read("KERAS_DIST_RANKS_SECONDS", 120.0)
    ssh: float = _read("KERAS_DIST_SSH_SECONDS", 20.0)
    lost: float = _read("KERAS_DIST_LOST_SECONDS", 15.0)
    save: float = _read("KERAS_DIST_SAVE_SECONDS", 30.0)
    lock: float = _read("KERAS_DIST_LOCK_SECONDS", 0.0)


def set_stall(argument: float | None) -> None:
    """Set the limit of stalls to what the user passed; `None` changes nothing."""
    if argument is not None:
        limit = read_number(argument, name="stall_limit", unit="seconds")
        os.environ[STALL] = str(limit)
