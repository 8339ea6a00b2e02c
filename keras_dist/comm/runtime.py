"""Connect this process with the others, once."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from keras_dist import monitor
from keras_dist.comm import transport
from keras_dist.comm.devices import Device, choose_device, is_unbound
from keras_dist.comm.world import World, identity, launched

# Names a rank to the processes that it starts, which have its environment.
_MARK = "KERAS_DIST_RANK_PROCESS"


@dataclass
class _Runtime:
    """What this process knows of its place; filled by `prepare` and `start`."""

    device: Device | None = None
    world: World | None = None
    link: transport.Link | None = field(default=None, repr=False)


_runtime = _Runtime()

# Inside `only`: the link to some of the ranks, and the place of this process there.
_current: ContextVar[tuple[transport.Link | None, World] | None] = ContextVar(
    "current", default=None
)


def prepare() -> None:
    """Choose this rank's device as soon as the package is imported.

    A script whose only change is `dist_fit` makes its model before it calls us, and
    TensorFlow fixes devices and threads when the first variable is made. Without a
    launcher this does nothing, nor does it in a process that a rank has started, to
    load data for instance: that one lives on the cores of its rank.
    """
    found = launched()
    if found is not None and _runtime.device is None and not _is_helper():
        os.environ[_MARK] = f"{os.getpid()} {identity()}"
        # mpirun by itself binds ranks to cores; horovodrun tells it not to.
        is_binding = found[0] == "horovodrun" or is_unbound()
        _runtime.device = choose_device(found[1], is_binding=is_binding)


def start(*, is_divided: bool = False) -> World:
    """Connect with the other ranks, the first time; the place of this process."""
    if _runtime.world is None:
        prepare()
        found = launched()
        if found is None:
            _runtime.world = World()
        elif _is_helper():
            _runtime.world = found[1]
        else:
            before = monitor.threads()
            _runtime.link = transport.connect(*found, is_divided=is_divided)
            world = _runtime.world = transport.world_of(_runtime.link)
            horovods = monitor.threads() - before
            monitor.start(rank=world.rank, size=world.size, without=horovods)
    return _link_and_world()[1]


def is_started() -> bool:
    """Whether `start` was called before."""
    return _runtime.world is not None


def is_within() -> bool:
    """Whether this is inside a block of `only`."""
    return _current.get() is not None


@contextlib.contextmanager
def only(link: transport.Link, world: World) -> Iterator[None]:
    """Inside the block, the ranks of `link` are all that there are."""
    token = _current.set((link, world))
    try:
        yield
    finally:
        _current.reset(token)


def connection() -> tuple[transport.Link | None, World]:
    """The link to the other ranks, `None` where there are none, and one's own place.

    Raises:
        RuntimeError: If this process is not a rank but was started by one.
    """
    start()
    link, world = _link_and_world()
    if world.size > 1 and _is_helper():
        raise RuntimeError(
            "Only the process of a rank can talk to the other ranks. Received: a call "
            f"in process {os.getpid()}, which was started by rank {world.rank} "
            f"(process {os.environ[_MARK].split()[0]}). Call it in the process of the "
            "rank and hand the result over."
        )
    return (link if world.size > 1 else None), world


def device() -> Device:
    """What this rank computes on."""
    start()
    return _runtime.device or Device()


def transport_name() -> str:
    """How the ranks talk: "Gloo", "MPI", "NCCL (…)", or "none" on one rank."""
    link, _ = connection()
    return "none" if link is None else transport.describe(link)


def built_transports() -> list[str]:
    """What Horovod was built with: of "gloo" and "mpi"."""
    return transport.built()


def has_mpi() -> bool:
    """Whether the ranks talk over MPI."""
    link, _ = connection()
    return link is not None and transport.has_mpi(link)


def rank() -> int:
    """Number of this process, from 0 (the first rank) to `size()` − 1."""
    return start().rank


def size() -> int:
    """How many processes train together."""
    return start().size


def local_rank() -> int:
    """Number of this process on its host, from 0."""
    return start().local_rank


def local_size() -> int:
    """How many of the processes run on this host."""
    return start().local_size


def _is_helper() -> bool:
    """Whether a rank of this job has started this process, or forked it."""
    process, _, job = os.environ.get(_MARK, "").partition(" ")
    return bool(process) and job == identity() and int(process) != os.getpid()


def _link_and_world() -> tuple[transport.Link | None, World]:
    return _current.get() or (_runtime.link, _runtime.world or World())
