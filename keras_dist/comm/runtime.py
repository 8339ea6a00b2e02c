"""Connect this process with the others, once."""

from dataclasses import dataclass, field
from types import ModuleType

from keras_dist.comm import transport
from keras_dist.comm.devices import Device, choose_device
from keras_dist.comm.world import World, launched


@dataclass
class _Runtime:
    """What this process knows of its place; filled by `prepare` and `init`."""

    device: Device | None = None
    world: World | None = None
    horovod: ModuleType | None = field(default=None, repr=False)


_runtime = _Runtime()


def prepare() -> None:
    """Choose this rank's device as soon as the package is imported.

    A script whose only change is `dist_fit` makes its model before it calls us, and
    TensorFlow fixes devices and threads when the first variable is made. Without a
    launcher this does nothing.
    """
    found = launched()
    if found is not None and _runtime.device is None:
        _runtime.device = choose_device(found[1])


def init() -> World:
    """Connect with the other ranks and return the place of this process.

    The first call starts Horovod when a launcher (`horovodrun`, `mpirun`) started
    this process, and chooses the device: one GPU per local rank with memory growth,
    or this rank's share of the cores. Later calls return the same value. Without a
    launcher this is the serial run: rank 0 of 1, no Horovod needed.

    Returns:
        A `World(rank, size, local_rank, local_size)`.

    Raises:
        RuntimeError: If a launcher started this process and Horovod is unusable.

    >>> init()
    World(rank=0, size=1, local_rank=0, local_size=1)
    """
    if _runtime.world is None:
        prepare()
        found = launched()
        if found is None:
            _runtime.world = World()
        else:
            _runtime.horovod = transport.connect(*found)
            _runtime.world = transport.world_of(_runtime.horovod)
    return _runtime.world


def connection() -> tuple[ModuleType | None, World]:
    """Horovod, or `None` where this rank is alone, and this rank's place."""
    world = init()
    return (_runtime.horovod if world.size > 1 else None), world


def device() -> Device:
    """What this rank computes on."""
    init()
    return _runtime.device or Device()


def transport_name() -> str:
    """How the ranks talk: "Gloo", "MPI", "NCCL (…)", or "none" on one rank."""
    horovod, _ = connection()
    return "none" if horovod is None else transport.describe(horovod)


def rank() -> int:
    """Number of this process, from 0 (the first rank) to `size()` − 1."""
    return init().rank


def size() -> int:
    """How many processes train together."""
    return init().size


def local_rank() -> int:
    """Number of this process on its host, from 0."""
    return init().local_rank


def local_size() -> int:
    """How many of the processes run on this host."""
    return init().local_size
