"""The only file that sets up and starts Horovod, and calls its collectives."""

import contextlib
import functools
import importlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from keras_dist.clusters import Place
from keras_dist.comm.rendezvous import compare_transports
from keras_dist.comm.transport import HOROVOD, INSTALL, Transport, forget_in_child
from keras_dist.comm.world import World
from keras_dist.launch.monitor import watchdog
from keras_dist.launch.time_limits import STALL, TimeLimits

# Horovod counts elements in 32 bits; NCCL in 64.
_MOST_ELEMENTS = 2**31 - 1

# Horovod's names of collectives outside of graphs, whatever name they are given; and
# the names in each graph that this rank has traced.
_KINDS = "Allgather Allreduce Alltoall Broadcast"
_EAGER = {f"Horovod{kind}" for kind in _KINDS.split()}
_traced: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

# A dtype in which nothing is sent, and what Horovod says to a rank that meets it.
_REFUSAL, _REFUSED = tf.int16, "rank had type int16"

# In each cycle of Horovod's thread the ranks exchange a message. By our change to its
# source (tools/install/patches/prompt_cycles.patch) a cycle begins as soon as there is
# a tensor, and else after so many milliseconds. A Horovod without it takes the other.
_LONGEST_CYCLE, _CYCLE = "KERAS_DIST_LONGEST_CYCLE_MS", "HOROVOD_CYCLE_TIME"

# Unless the user has set them.
_ON_CPU = {
    # At Horovod's default of 1 ms the thousand messages per second slow down a core
    # that also computes.
    _CYCLE: "2.5",
    # No fusion by Horovod. Small gradients are packed by us already; fusing large ones
    # that are ready at the same time copies them twice more, into a buffer that stays
    # allocated.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # By our change to its source (tools/install/patches/read_memory.patch) ranks of one
    # host sum large tensors over Gloo by reading each other's memory, if they may.
    "KERAS_DIST_READ_MEMORY": "1",
}

# Open MPI spins while it waits. On a rank that computes on the CPU, TensorFlow has a
# thread for each core of the rank, from which a spinning thread takes the core.
_YIELD = "OMPI_MCA_mpi_yield_when_idle"

# How ranks of one host copy large messages. Out of the memory of the other process, its
# default, takes longer than through shared memory. XPMEM has no copy at all.
_COPY, _XPMEM = "OMPI_MCA_btl_vader_single_copy_mechanism", "/dev/xpmem"

# Networks between the hosts for large messages: either may be set, not both.
_INCLUDE, _EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
_DEFAULT_EXCLUDED = ("127.0.0.1/8", "sppp")  # Open MPI's own

# Bridges that container engines and hypervisors make on each host, often with the same
# address on all. Open MPI takes that for a network of all hosts, connects a host to
# itself, and waits forever.
_BRIDGE = re.compile(
    r"(?:docker|virbr|lxcbr|lxdbr|podman|cni|cni-podman|nerdctl)\d+|br-[\da-f]{12}"
)


def connect(place: Place, expected: World) -> "HorovodTransport":
    """Start Horovod, and return the link to all ranks.

    Every rank calls this.

    Args:
        place: Where this rank stands.
        expected: Rank and size that the launcher gave to this process.

    Raises:
        RuntimeError: If another rank has another transport; if Horovod is missing, was
            built without TensorFlow, or connects other processes than the launcher
            started.
    """
    compare_transports(place, HOROVOD)
    launcher = place.launcher
    is_on_cpu = not tf.config.get_visible_devices("GPU")
    starting = contextlib.ExitStack()
    if launcher.startswith("mpirun"):
        set_for_mpi(is_on_cpu=is_on_cpu)
        starting.enter_context(limit_start(expected.rank, expected.size))
    if is_on_cpu:
        set_for_cpu()
    try:
        horovod = importlib.import_module("horovod.tensorflow")
        before_start = watchdog.threads()
        with starting:
            if (
                threading.current_thread() is threading.main_thread()
                and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            ):
                # Ctrl-C ends this process at once: Python would see it only after all
                # ranks have come, of which one may have left.
                before = signal.signal(signal.SIGINT, signal.SIG_DFL)
                starting.callback(signal.signal, signal.SIGINT, before)
            horovod.init()
        started = watchdog.threads() - before_start
        if is_on_cpu:
            _schedule_sender(started)
    except Exception as error:  # after any error the user has to build Horovod again
        raise RuntimeError(
            f"This process was started by {launcher} as rank {expected.rank} of "
            f"{expected.size}, but Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. "
            f"Run `{INSTALL}` in this environment, or start the script with plain "
            "`python` to train on one process."
        ) from error
    forget_in_child(horovod.shutdown)
    if horovod.size() != expected.size:
        raise RuntimeError(
            f"{launcher} started {expected.size} processes, but Horovod connects "
            f"{horovod.size()}. It was probably built without the transport of this "
            f"launcher. Run `{INSTALL} --mpi`, or start with `horovodrun --gloo`."
        )
    world = World(
        rank=horovod.rank(),
        size=horovod.size(),
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
        # Each host has a rank with the first rank's local rank, which is 0.
        num_hosts=horovod.cross_size(),
    )
    return HorovodTransport(horovod, world, started)


def set_for_cpu() -> None:
    """Set what the user has not set, before Horovod starts."""
    if _CYCLE not in os.environ:
        os.environ.setdefault(_LONGEST_CYCLE, "10")
    for name, value in _ON_CPU.items():
        os.environ.setdefault(name, value)


def set_for_mpi(*, is_on_cpu: bool) -> None:
    """Set variables of Open MPI that the user has not set; call it before MPI starts.

    Args:
        is_on_cpu: Whether this rank has no GPU.
    """
    if is_on_cpu:
        os.environ.setdefault(_YIELD, "1")
        if not os.path.exists(_XPMEM):
            os.environ.setdefault(_COPY, "none")
    names = [name for _, name in socket.if_nameindex()]
    bridges = [name for name in names if _BRIDGE.fullmatch(name)]
    if bridges and _INCLUDE not in os.environ:
        os.environ.setdefault(_EXCLUDE, ",".join([*_DEFAULT_EXCLUDED, *bridges]))


@contextlib.contextmanager
def limit_start(rank: int, size: int) -> Iterator[None]:
    """Context manager that ends this rank if it takes longer than the stall limit.

    MPI itself waits forever, and under `mpirun` there is no store in which the ranks
    could see each other.

    Args:
        rank: Rank of this process, for the message.
        size: Number of ranks.
    """
    limit = TimeLimits().stall
    timer = threading.Timer(limit, _end, [rank, size, limit])
    timer.daemon = True
    if limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(rank: int, size: int, limit: float) -> None:
    names = ", ".join(name for _, name in socket.if_nameindex())
    message = (
        f"MPI has not connected the ranks for {limit:g} s, and the job ends. Received: "
        f"rank {rank} of {size} on {socket.gethostname()}, with the network interfaces "
        f"{names}. Of several hosts, name the network on which they reach each other: "
        "`mpirun --mca btl_tcp_if_include 10.0.0.0/24`. If another rank needs longer "
        f"before it connects, raise the limit: {STALL}=600.\n"
    )
    os.write(2, f"keras_dist: {message}".encode())
    os._exit(watchdog.EXIT_CODE)  # mpirun then ends the others


def _schedule_sender(started: Collection[int]) -> None:
    """Let Horovod's thread, which sends, not preempt another thread when it wakes up.

    It gets the scheduling policy SCHED_BATCH. A rank with one core has it in common
    with Gloo's threads, which serve the sockets, and spin where the sender holds a lock
    that they need. On two idle cores a sum of 1 KiB takes 0.6 ms; 3 to 6 ms without
    this. On busy cores it takes 1 to 8 ms; 8 to 11 ms if Gloo's threads have it, too.

    Args:
        started: Ids of the threads of Horovod; it starts its own one first.
    """
    with contextlib.suppress(OSError, ValueError):  # as where the policy is forbidden
        sender = min(started)
        if os.sched_getscheduler(sender) == os.SCHED_OTHER:
            os.sched_setscheduler(sender, os.SCHED_BATCH, os.sched_param(0))


def library() -> ModuleType:
    """Horovod's module, also where nothing connects this process to others.

    Raises:
        RuntimeError: If Horovod cannot be imported.
    """
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:  # of its library, of another TensorFlow, of its checks
        raise RuntimeError(
            "Horovod cannot be used here. "
            f"Received: {type(error).__name__}: {error}. Run `{INSTALL}`."
        ) from error


class HorovodTransport(Transport):
    """Horovod, over Gloo or MPI; between GPUs also over NCCL.

    Args:
        module: Horovod's module, which is connected.
        world: Rank and size, as Horovod knows them.
        threads: Ids of the threads that Horovod has started.
    """

    is_horovod = True

    def __init__(self, module: ModuleType, world: World, threads: set[int]) -> None:
        self._module, self.world, self.ignored_threads = module, world, threads
        is_nccl = "NCCL" in self.describe()
        self.most_elements = 0 if is_nccl else _MOST_ELEMENTS

    def describe(self) -> str:
        """Return Gloo or MPI; between GPUs NCCL with one of them."""
        module = self._module
        control = "MPI" if module.mpi_built() and module.mpi_enabled() else "Gloo"
        if module.nccl_built() and tf.config.get_visible_devices("GPU"):
            return f"NCCL ({control} for control)"
        return control

    def send(self, function: str, tensor: Any, name: str, **options: Any) -> Any:
        """Call a function of Horovod.

        By default Horovod puts TensorFlow's name scope before the name. The scope
        contains the names of Keras layers, which differ as soon as one rank has made
        one more model: the ranks would then wait forever. So the scope is ignored.
        """
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            _traced.setdefault(graph, set()).add(name)
        if function == "allreduce":
            options = {"op": self._module.Sum, **options}
        if compression := options.get("compression"):
            theirs = getattr(self._module.Compression, compression)
            options = {**options, "compression": theirs}
        options.pop("equal_rows", None)  # it compares them in any case
        options |= {"name": name, "ignore_name_scope": True}
        return getattr(self._module, function)(tensor, **options)

    def list_names(self) -> set[str]:
        """List the names of all collectives in which others may wait for this rank."""
        return _EAGER.union(*_traced.values())

    @contextlib.contextmanager
    def refuse(self, names: Collection[str]) -> Iterator[None]:
        """Context manager in which collectives are answered by another dtype."""
        with ThreadPoolExecutor(max_workers=len(names) or 1) as threads:
            for name in names:
                threads.submit(self._refuse, name)
            yield

    def _refuse(self, name: str) -> None:
        """Answer a collective by one of another dtype, until all ranks do."""
        gather = functools.partial(self._module.allgather, ignore_name_scope=True)
        send = tf.function(
            lambda tensor: gather(tensor, name=name), autograph=False
        ).get_concrete_function(tf.TensorSpec([1], _REFUSAL))
        with contextlib.suppress(tf.errors.UnknownError), tf.device("CPU:0"):
            while True:  # until Horovod is shut down
                try:
                    send(tf.zeros([1], _REFUSAL))
                except (
                    tf.errors.FailedPreconditionError,
                    tf.errors.InvalidArgumentError,
                ):
                    time.sleep(0.01)  # another rank, or a thread of this one, was there
                else:
                    return

    def is_refused(self, error: Exception) -> bool:
        """Return True for the error of a collective that another rank has refused."""
        return _REFUSED in str(error)

    def leave(self) -> None:
        """Shut Horovod down."""
        self._module.shutdown()
