"""The state of this process: its device, its rank, and its link to the other ranks."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from keras_dist.clusters import Place, find_place
from keras_dist.comm import horovod_transport, tensorflow_transport
from keras_dist.comm.devices import Device, choose_device
from keras_dist.comm.rendezvous import compare_transports, meet
from keras_dist.comm.transport import HOROVOD, TENSORFLOW, VARIABLE, Transport
from keras_dist.comm.world import (
    World,
    check_not_elastic,
    check_not_stranded,
    identity,
    world_at,
)
from keras_dist.launch.monitor import record, watchdog
from keras_dist.launch.monitor.rank_process import seed_generators
from keras_dist.launch.store import find_store
from keras_dist.launch.time_limits import set_stall

# Holds the process id of a rank. The processes that a rank starts inherit it, and so
# they know that they are not ranks, although they inherit its HOROVOD_RANK as well.
_RANK_PROCESS = "KERAS_DIST_RANK_PROCESS"


@dataclass
class _Runtime:
    """State of this process.

    Args:
        device: Set by `prepare`.
        world: Set by `start`; `None` before.
        link: Set by `start`, or by `prepare` for TensorFlow's own collectives; `None`
            on one rank.
        failure: Why the ranks could not meet, or that they have ended: they do not try
            again.
    """

    device: Device | None = None
    world: World | None = None
    link: Transport | None = field(default=None, repr=False)
    failure: RuntimeError | None = None


_runtime = _Runtime()

# Inside of `without_collectives`: the message of the error.
_forbidden: ContextVar[str] = ContextVar("forbidden", default="")
_ELSEWHERE = (
    "Other ranks do not run this block of `first_rank()`, or this callback of the "
    "first rank only, at the same time: no collective can be in it. Received: a "
    "collective on rank {rank}. Call it (`dist_fit`, `gather`, "
    "`DistributedModel.evaluate`) before or after the block, or in a callback of all "
    "ranks."
)


def prepare() -> None:
    """Choose the device of this rank when the package is imported.

    It must be that early: a script whose only change is `dist_fit` makes its model
    before it calls the package, and TensorFlow fixes devices and threads when the first
    variable is made. TensorFlow's own collectives are started here, too, since devices
    get other names by it.

    Does nothing without a launcher, nor in a process that a rank has started, for
    example to load data: it runs on the cores of its rank.
    """
    place = find_place()
    if place is None or _runtime.device is not None or is_rank_child():
        return
    _mark_process()
    seed_generators(place.job)
    is_binding = place.launcher == "horovodrun"
    _runtime.device = choose_device(world_at(place), is_binding=is_binding)
    if place.size > 1 and _choose_transport(place) == TENSORFLOW:
        _connect(place, TENSORFLOW)
    elif place.size > 1:  # a rank with the other one must not wait for this one
        compare_transports(place, HOROVOD)


def _choose_transport(place: Place) -> str:
    """Return what the user has chosen; else Horovod where it is installed.

    Under `mpirun` no store tells the ranks where the others are; Horovod needs none.

    Raises:
        ValueError: If the variable names no transport.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", HOROVOD, TENSORFLOW):
        raise ValueError(
            f"{VARIABLE} must be {HOROVOD} or {TENSORFLOW}. Received: "
            f"{VARIABLE}={choice}. Without it, Horovod is used where it is installed."
        )
    if choice or not (place.address or find_store()):
        return choice or HOROVOD
    try:
        horovod_transport.library()
    except RuntimeError:
        return TENSORFLOW
    return HOROVOD


def _connect(place: Place, choice: str) -> Transport:
    """Connect to the other ranks, by a transport that all have chosen."""
    check_not_elastic()
    if _runtime.failure is not None:
        raise _runtime.failure
    transport = horovod_transport if choice == HOROVOD else tensorflow_transport
    try:
        if place.address:
            meet(place)
            _mark_process()
        _runtime.link = transport.connect(place, world_at(find_place()))
    except RuntimeError as error:
        _runtime.failure = error
        raise
    return _runtime.link


def _mark_process() -> None:
    os.environ[_RANK_PROCESS] = f"{os.getpid()} {identity()}"


def init(*, stall_limit: float | None = None) -> World:
    """Connect to the other ranks, and return the rank and size of this process.

    If a launcher, such as `keras-dist run` or `srun`, started this process, the first
    call starts Horovod, or TensorFlow's own collectives, which `import keras_dist` has
    started already. Later calls return the same value. The device was chosen when
    keras_dist was imported: one GPU per local rank with memory growth, or this rank's
    share of the CPU cores. Without a launcher, this process is rank 0 of 1, and Horovod
    is not needed.

    Args:
        stall_limit: The job ends if no rank makes progress for this many seconds; 0
            turns this off. It has an effect in the first call only. The default is the
            environment variable `KERAS_DIST_STALL_SECONDS`, or 120.

    Returns:
        A `World(rank, size, local_rank, local_size)`.

    Raises:
        RuntimeError: If a launcher started this process but Horovod cannot be used.
        ValueError: If `stall_limit` is not a number of seconds.

    Example:

    >>> init()
    World(rank=0, size=1, local_rank=0, local_size=1)
    """
    set_stall(stall_limit)
    return start()


def start() -> World:
    """Connect to the other ranks in the first call; return rank and size."""
    if _runtime.world is None:
        prepare()
        place = find_place()
        if place is None:
            check_not_stranded()
        if (
            place is None
            or is_rank_child()
            or (place.size == 1 and _choose_transport(place) == TENSORFLOW)
        ):
            _runtime.world = world_at(place)
        else:
            link = _runtime.link or _connect(place, _choose_transport(place))
            _runtime.world = link.world
            watchdog.start(
                rank=link.world.rank,
                size=link.world.size,
                ignored_threads=link.ignored_threads,
            )
    return _runtime.world


def stop() -> None:
    """End the connection to the other ranks, for good."""
    if _runtime.link is not None:
        _runtime.link.leave()
        _runtime.failure = RuntimeError(
            "The link to the other ranks was shut down in this process, and cannot be "
            "started again. Received: a call that needs the other ranks. Call "
            "`shutdown` at the end of the script."
        )
    _runtime.link = _runtime.world = None


def job_world() -> World:
    """Rank and size as the launcher set them, without a connection to other ranks."""
    return world_at(find_place())


def is_started() -> bool:
    """Return True if `start` was called before."""
    return _runtime.world is not None


@contextlib.contextmanager
def without_collectives(message: str = _ELSEWHERE) -> Iterator[None]:
    """Context manager in which a collective is an error: others are elsewhere."""
    token, before = _forbidden.set(message), record.here.is_alone
    record.here.is_alone = message == _ELSEWHERE  # has a stall limit of its own
    try:
        yield
    finally:
        record.here.is_alone = before
        _forbidden.reset(token)


def connected_link() -> Transport | None:
    """Return the link to the other ranks, if there is one already."""
    return _runtime.link


def connection() -> tuple[Transport | None, World]:
    """Return the link to the other ranks, `None` on one rank; and rank and size.

    Raises:
        RuntimeError: If this process is not a rank but was started by one, or inside
            of `without_collectives`.
    """
    world, link = start(), _runtime.link
    if world.size > 1 and (message := _forbidden.get()):
        raise RuntimeError(message.format(rank=world.rank))
    if world.size > 1 and is_rank_child():
        raise RuntimeError(
            "A collective can only be called in the process of a rank. Received: a "
            f"call in process {os.getpid()}, which was started by rank {world.rank} "
            f"(process {os.environ[_RANK_PROCESS].split()[0]}). Call it in the process "
            "of the rank, and pass the result to this one."
        )
    return (link if world.size > 1 else None), world


def device() -> Device:
    """Return the device that this rank computes on."""
    start()
    return _runtime.device or Device()


def transport_name() -> str:
    """Name of the transport, as `Transport.describe` returns it; "none" on one rank."""
    link, _ = connection()
    return "none" if link is None else link.describe()


def rank() -> int:
    """Return the rank of this process.

    The first call connects to the other ranks, as `init` does.

    Returns:
        Its number, from 0 (the first rank) to `size()` − 1.

    Example:

    >>> rank()  # without a launcher: one process
    0
    """
    return start().rank


def size() -> int:
    """Return the number of ranks.

    The first call connects to the other ranks, as `init` does.

    Returns:
        The number of all ranks.

    Example:

    >>> size()  # without a launcher: one process
    1
    """
    return start().size


def local_rank() -> int:
    """Return the rank of this process among the ranks of its host.

    The first call connects to the other ranks, as `init` does.

    Returns:
        Its number, from 0 to `local_size()` − 1.

    Example:

    >>> local_rank()  # without a launcher: one process
    0
    """
    return start().local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    The first call connects to the other ranks, as `init` does.

    Returns:
        The number of ranks, at least 1.

    Example:

    >>> local_size()  # without a launcher: one process
    1
    """
    return start().local_size


def is_rank_child() -> bool:
    """Return True if a rank of this job has started or forked this process."""
    process, _, job = os.environ.get(_RANK_PROCESS, "").partition(" ")
    return bool(process) and int(process) != os.getpid() and job == identity()
