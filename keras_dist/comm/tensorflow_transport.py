"""The transport on TensorFlow's own collectives, which are in each of its wheels.

The ranks find each other by keys, which are digests of the name, dtype and size of what
they send: the same key with another shape would end all collectives of the job, for
good. Wherever sizes are not known while tracing, the ranks first compare them.

A rank that fails writes a note into the store of the job. A thread in each rank reads
it, and cancels the functions that wait. It also checks that the processes of all other
ranks still exist. Collectives do not notice an end: they would wait forever.
"""

import atexit
import contextlib
import functools
import os
import random
import socket
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import psutil
import tensorflow as tf

from keras_dist import private
from keras_dist.clusters import Place
from keras_dist.comm.rendezvous import compare_transports
from keras_dist.comm.transport import (
    INSTALL,
    TENSORFLOW,
    VARIABLE,
    Transport,
    forget_in_child,
)
from keras_dist.comm.world import World
from keras_dist.launch.hosts import LOOPBACK, addresses, find_address_towards
from keras_dist.launch.monitor.rank_process import SHUT_DOWN
from keras_dist.launch.store import MANY, StoreClient, find_store
from keras_dist.launch.time_limits import TimeLimits

# Seconds between two looks at the store and the other ranks; more where there are many
# ranks. Seconds for an answer of a rank; and for the others to end when this one does.
_TICK, _MANY = 0.5, 32
_ANSWER_SECONDS, _LEAVE_SECONDS = 5.0, 1.0

# Numbers of the accounts of people, on most systems.
_ACCOUNTS = range(1000, 60_000)

# Ports for TensorFlow's server.
_PORTS = range(15_000, 20_000)

# What gRPC says of a process that is gone, at once; a network may come back.
_GONE = "Connection refused"

# Name, in the store, of the note of a rank that has failed.
_FAILED = "failed."

# A message of gRPC has at most 2 GiB: larger vectors travel in parts of so many bytes.
# More parts at once were not faster on two busy cores: they are copied once more.
_MOST_BYTES = 2**28

# What is smaller is gathered, and added in the order of the ranks: half the messages of
# a reduction, one after the other (1 KiB on 2 ranks: 0.6 ms of CPU time, not 0.8).
_SMALL = 2**17

# Keys are numbers of 31 bits; digests are mixed by other primes.
_PRIME, _MIX = 2**31 - 1, (31, 7919, 104_729)

# Operations of an allreduce, by Horovod's numbers of them; 0 is the average.
_AVERAGE, _SUM = 0, 1
_OPERATIONS = {_AVERAGE: "Add", _SUM: "Add", 3: "Min", 4: "Max", 5: "Mul"}

_FUNCTIONS = "allreduce", "reducescatter", "allgather", "broadcast", "alltoall"

# TensorFlow's operations, which have no gradients; this file has them.
_USED = ["CollectiveReduceV2", "CollectiveGatherV2"]
_USED += ["CollectiveBcastSendV2", "CollectiveBcastRecvV2"]

_MISMATCH = "Mismatched data types, shapes or root ranks in a collective of the ranks"


def connect(place: Place, world: World) -> "TensorFlowTransport":
    """Start TensorFlow's server on this rank, and connect it to the others.

    Every rank calls this, before its first tensor.

    Args:
        place: Where this rank stands.
        world: Rank and size.

    Raises:
        RuntimeError: If TensorFlow has made its devices already, if the launcher has no
            store, or if the ranks do not meet.
    """
    if private.has_devices():
        raise RuntimeError(
            "TensorFlow's own collectives begin before the first tensor, variable or "
            "model. Received: one that was made before `import keras_dist`. Move that "
            f"import to the first line of the script, or run `{INSTALL}` to use "
            "Horovod."
        )
    _warn_about_accounts(place)
    store = find_store()
    if store is None:
        raise RuntimeError(
            f"{place.launcher} does not say where ranks meet, so that TensorFlow's own "
            f"collectives cannot connect them. Received: rank {place.rank} of "
            f"{place.size}, and {VARIABLE}={os.environ.get(VARIABLE, '')}. Run "
            f"`{INSTALL} --mpi`, or name a meeting: KERAS_DIST_RDZV=HOST:29400."
        )
    host, interface = LOOPBACK, os.environ.get("HOROVOD_GLOO_IFACE", "")
    if place.local_size < place.size:  # the address at which other hosts reach it
        host = addresses().get(interface) or find_address_towards(store.host)
    with _reserve_port() as port:
        address = f"{host}:{port.getsockname()[1]}"
        notes = compare_transports(place, TENSORFLOW, waits=True, address=address)
    workers = [note["address"] for note in notes]
    try:
        private.start_collectives(tf.train.ClusterSpec({"worker": workers}), world.rank)
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"TensorFlow's server cannot start. Received: {address} on rank "
            f"{place.rank}: {error}. Another program may have taken the port in this "
            "moment: start the job again."
        ) from error
    hosts = {worker.rpartition(":")[0] for worker in workers}
    return TensorFlowTransport(replace(world, num_hosts=len(hosts)), store)


def _reserve_port() -> socket.socket:
    """Return a socket with a port for TensorFlow's server, which cannot share it.

    The port is none that the system gives to connections, so nearly nobody takes it
    between the end of this socket and the beginning of the server.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        probe = socket.socket()
        with contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe
        probe.close()
    raise RuntimeError(
        f"No port is free for TensorFlow's server. Received: 100 ports of {_PORTS}, "
        f"all in use. Run `{INSTALL}` to use Horovod."
    )


def _warn_about_accounts(place: Place) -> None:
    """Warn if other people use this host, who could reach TensorFlow's server."""
    users = (process.info["uids"] for process in psutil.process_iter(["uids"]))
    found = {user.effective for user in users if user}
    others = sorted(found & set(_ACCOUNTS) - {os.getuid()})
    if others and place.local_rank == 0:
        warnings.warn(
            "TensorFlow's server has no authentication, and other accounts on this "
            f"host can reach it. Received: processes of the users {others}. Run "
            f"`{INSTALL}` to use Horovod instead.",
            stacklevel=2,
        )


class TensorFlowTransport(Transport):
    """TensorFlow's own collectives: over gRPC, and between GPUs over NCCL.

    Args:
        world: Rank and size.
        store: The store of the job.

    Attributes:
        accelerator: The device whose floats are summed there, and how: "nccl"; empty
            where there are CPUs alone.
    """

    def __init__(self, world: World, store: StoreClient) -> None:
        self.world, self._store = world, store
        has_gpu = bool(tf.config.get_visible_devices("GPU"))
        self.accelerator: tuple[str, ...] = ("GPU:0", "nccl") if has_gpu else ()
        self.most_elements = 2**31 - 1
        # Each failure begins another generation of keys, in which nothing of the last
        # one is under way any more. Graphs read its number.
        self._generation, self._is_telling, self._is_aborted = 0, False, False
        self._canceler, self._listeners = private.Canceler(), 0
        self._lock, self._is_over = threading.RLock(), threading.Event()
        for operation in _USED:
            with contextlib.suppress(KeyError):  # somebody has done so
                tf.no_gradient(operation)
        self._set_generation(0)
        threading.Thread(target=self._watch, daemon=True).start()
        atexit.register(self.leave)
        forget_in_child(self.leave)

    def describe(self) -> str:
        """Return what TensorFlow sends by."""
        return f"TensorFlow ({'NCCL' if self.accelerator else 'gRPC'})"

    def send(self, function: str, tensor: Any, name: str, **options: Any) -> Any:
        """Run a collective, with its gradient; also "reducescatter", for `horovod`."""
        if function not in _FUNCTIONS or "process_set" in options:
            raise RuntimeError(
                "TensorFlow's own collectives have no process sets, and not all "
                f"functions of Horovod. Received: {function} with "
                f"{', '.join(options) or 'no options'}. Run `{INSTALL}`."
            )

        @tf.custom_gradient
        def call(tensor: Any) -> Any:
            def differentiate(upstream: Any) -> Any:
                own = f"{name}.gradient"
                if function in ("allreduce", "alltoall"):
                    return self.send(function, upstream, own, **options)
                if function == "reducescatter":
                    return self.send("allgather", upstream, own)
                rank, total = self.world.rank, self.send("allreduce", upstream, own)
                mean = total / self.world.size  # as Horovod's
                if function == "broadcast":
                    is_root = rank == options["root_rank"]
                    return mean if is_root else tf.zeros_like(mean)
                rows = tf.shape(tensor)[:1]
                before = self._run("allgather", rows, f"{name}.rows")[:rank]
                return mean[tf.reduce_sum(before) :][: rows[0]]

            return self._run(function, tensor, name, **options), differentiate

        return call(tensor)

    def _run(self, function: str, tensor: Any, name: str, **options: Any) -> Any:
        """Run a collective; outside of a graph, in a function that can be canceled."""
        if not tf.executing_eagerly():
            result = self._build(function, tensor, name, **options)
            is_same = function in ("allreduce", "broadcast", "alltoall")
            shape = tensor.shape if is_same else [None, *tensor.shape[1:]]
            return tf.ensure_shape(result, shape)
        parts = _count_parts(tensor)
        call = self._make_function(
            function, tensor.dtype, tensor.shape.rank, num_parts=parts, **options
        )
        try:
            with self.listen():
                return call(tensor, tf.constant(zlib.crc32(name.encode()), tf.int64))
        except tf.errors.InvalidArgumentError as error:
            if _MISMATCH not in str(error):
                raise
            text = (
                f"{_MISMATCH}. Received on this one: {function} of the data type "
                f"{tensor.dtype.name} and the shape {tuple(tensor.shape)}, {options}."
            )
            raise tf.errors.FailedPreconditionError(None, None, text) from None

    @functools.cache  # noqa: B019 - there is one transport, to the end of the process
    def _make_function(
        self, function: str, dtype: Any, num_axes: int, **options: Any
    ) -> Any:
        """Compile a collective of tensors of any size, and of any name's digest."""
        build = functools.partial(self._build, function, **options)
        spec = tf.TensorSpec([None] * num_axes, dtype), tf.TensorSpec([], tf.int64)
        with tf.init_scope():
            return tf.function(build, autograph=False).get_concrete_function(*spec)

    def _build(
        self, function: str, tensor: Any, name: Any, num_parts: int = 0, **options: Any
    ) -> Any:
        """Add the operations of a collective to a graph."""
        build, dtype = getattr(self, f"_{function}"), tensor.dtype
        text = f"{function} {dtype.name} {options}"
        options["num_parts"] = num_parts or _count_parts(tensor)
        # The accelerator adds floats, and no more.
        is_fast = self.accelerator and function == "allreduce" and dtype.is_floating
        options |= {"is_fast": True} if is_fast else {}
        with tf.device(self.accelerator[0] if is_fast else "CPU:0"):
            # TensorFlow sends no bool, and no numbers of 8 bits.
            sent = tf.cast(tensor, tf.int32) if dtype.size == 1 else tensor
            return tf.cast(build(sent, name, text, **options), dtype)

    def _allreduce(
        self,
        tensor: Any,
        name: Any,
        text: str,
        *,
        num_parts: int,
        is_fast: bool = False,
        op: int = _SUM,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: str = "none",
    ) -> Any:
        shape = tf.shape(tensor)
        tensor = _scale(tensor, prescale_factor)
        if compression == "fp16" and tensor.dtype.is_floating:
            tensor = tf.cast(tensor, tf.float16)
        flat = tf.reshape(tensor, [-1])
        if not (isinstance(name, str) and tensor.shape.is_fully_defined()):
            flat = tf.pad(flat, [[0, 1]])  # gRPC sends no empty message
            with tf.control_dependencies([self._compare(name, text, shape)]):
                flat = tf.identity(flat)
        elif tensor.shape.num_elements() == 0:
            return tensor
        sums = []
        operation = _OPERATIONS[op]
        for number, part in enumerate(_split(flat, num_parts)):
            count = part.shape.num_elements()  # None while it is not known
            is_small = count is not None and count * part.dtype.size < _SMALL
            if operation == "Add" and is_small and not is_fast:
                common = self._common(name, f"{text} small", tf.size(part))
                everyone = tf.raw_ops.CollectiveGatherV2(input=part, **common)
                sums.append(tf.add_n(tf.split(everyone, self.world.size)))
                continue
            common = self._common(name, f"{text} {number}", tf.size(part))
            if is_fast:
                # NCCL needs one order on all ranks: that in which the graph was traced.
                device, hint = self.accelerator
                common |= {"group_key": 2, "communication_hint": hint}
                common["ordering_token"] = [self._make_order(device).handle]
            how = {"merge_op": operation, "final_op": "Id"}
            sums.append(tf.raw_ops.CollectiveReduceV2(input=part, **how, **common))
        result = tf.reshape(tf.concat(sums, 0)[: tf.reduce_prod(shape)], shape)
        factor = postscale_factor / (self.world.size if op == _AVERAGE else 1)
        return _scale(result, factor)

    def _reducescatter(self, tensor: Any, *args: Any, **options: Any) -> Any:
        total = self._allreduce(tensor, *args, **options)
        sizes = tf.stack(_divide(tf.shape(total)[0], self.world.size))
        begin = tf.reduce_sum(sizes[: self.world.rank])
        return total[begin:][: sizes[self.world.rank]]

    def _allgather(
        self, tensor: Any, name: Any, text: str, *, equal_rows: bool = False, **_: Any
    ) -> Any:
        shape, size = tf.shape(tensor), self.world.size
        if equal_rows:
            rows = tf.fill([size], shape[0])
        else:
            rows = self._compare(name, text, shape[1:], shape[0])
        flat, counts = tf.reshape(tensor, [-1]), rows * tf.reduce_prod(shape[1:])
        most = tf.maximum(tf.reduce_max(counts), 1)
        everyone = tf.raw_ops.CollectiveGatherV2(
            input=tf.pad(flat, [[0, most - tf.size(flat)]]),
            **self._common(name, text, most),
        )
        everyone = tf.reshape(everyone, [size, most])
        parts = [everyone[rank, : counts[rank]] for rank in range(size)]
        return tf.reshape(tf.concat(parts, 0), tf.concat([[-1], shape[1:]], 0))

    def _alltoall(self, tensor: Any, name: Any, text: str, **_: Any) -> Any:
        everyone = self._allgather(tensor, name, text, equal_rows=True)
        size, shape = self.world.size, tf.shape(tensor)
        chunks = tf.concat([[size, size, shape[0] // size], shape[1:]], 0)
        return tf.reshape(tf.reshape(everyone, chunks)[:, self.world.rank], shape)

    def _broadcast(
        self, tensor: Any, name: Any, text: str, *, num_parts: int, root_rank: int
    ) -> Any:
        shape = tf.shape(tensor)
        with tf.control_dependencies([self._compare(name, text, shape)]):
            flat = tf.pad(tf.reshape(tensor, [-1]), [[0, 1]])
        found = []
        for number, part in enumerate(_split(flat, num_parts)):
            common = self._common(name, f"{text} {number}", tf.size(part))
            common.pop("ordering_token")
            if self.world.rank == root_rank:
                sent = tf.raw_ops.CollectiveBcastSendV2(input=part, **common)
            else:
                sent = tf.raw_ops.CollectiveBcastRecvV2(
                    shape=tf.shape(part), T=part.dtype, **common
                )
            found.append(sent)
        return tf.reshape(tf.concat(found, 0)[:-1], shape)

    @functools.cache  # noqa: B019
    def _make_order(self, device: str) -> Any:
        """Make what all collectives of a device use, one after the other."""
        with tf.init_scope(), tf.device(device):
            return tf.Variable(0.0, trainable=False)

    def _compare(self, name: Any, text: str, shape: Any, rows: Any = 0) -> Any:
        """Return the rows of each rank; raise on all if one sends something else."""
        factors = tf.range(1, tf.size(shape) + 1) * _MIX[1]
        digest = tf.reduce_sum(tf.cast((shape + 1) * factors, tf.int64))
        own = [zlib.crc32(text.encode()), digest, tf.cast(rows, tf.int64)]
        common = self._common(name, "compare", 0)
        with tf.device("CPU:0"):
            everyone = tf.raw_ops.CollectiveGatherV2(input=tf.stack(own), **common)
        everyone = tf.reshape(everyone, [self.world.size, 3])
        is_equal = tf.reduce_all(everyone[:, :2] == everyone[:1, :2])
        with tf.control_dependencies([tf.debugging.Assert(is_equal, [_MISMATCH])]):
            return tf.cast(everyone[:, 2], tf.int32)

    def _common(self, name: Any, text: str, count: Any) -> dict[str, Any]:
        """Return the arguments of all collectives: their group, and their key."""
        digest = zlib.crc32(name.encode()) if isinstance(name, str) else name
        with tf.device("CPU:0"):
            generation = tf.raw_ops.ReadVariableOp(
                resource=_find_generation(), dtype=tf.float32
            )
            key = digest * _MIX[0] + zlib.crc32(text.encode())
            for number, factor in ((count, _MIX[1]), (generation, _MIX[2])):
                key += tf.cast(number, tf.int64) * factor
            key = tf.cast(key % _PRIME, tf.int32)
        return {
            "group_size": self.world.size,
            "group_key": 1,
            "instance_key": key,
            "communication_hint": "ring",
            "timeout_seconds": 0.0,
            "ordering_token": [],
        }

    def _set_generation(self, number: int) -> None:
        self._generation = number
        with tf.init_scope(), tf.device("CPU:0"):
            tf.raw_ops.AssignVariableOp(
                resource=_find_generation(), value=float(number)
            )

    def list_names(self) -> set[str]:
        """Return nothing: a failure ends all collectives of its generation."""
        return set()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Context manager in which functions end as soon as another rank has failed."""
        with self._lock:
            self._listeners += 1
            private.cancel_functions_by(self._canceler)
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1
                if not self._listeners:
                    private.cancel_functions_by(None)

    @contextlib.contextmanager
    def refuse(self, names: Collection[str]) -> Iterator[None]:
        """Context manager that ends functions of all ranks, which may wait."""
        with self._lock:
            self._is_telling = True
            self._cancel()
        if not self._is_aborted:  # else the others find that for themselves
            note = f"{_FAILED}{self._generation}"
            self._store.put(note, self.world.rank, attempts=MANY)
        try:
            yield
        finally:
            with self._lock:
                self._cancel()  # what other threads have begun meanwhile
                self._set_generation(self._generation + 1)
                self._is_telling = False

    def _cancel(self) -> None:
        """End the functions that run; those that begin later obey a new canceler."""
        self._canceler.start_cancel()
        self._canceler = private.Canceler()
        if self._listeners:
            private.cancel_functions_by(self._canceler)

    def is_refused(self, error: Exception) -> bool:
        """Return True for the error of a function that was ended by a failure."""
        is_canceled = isinstance(error, tf.errors.CancelledError)
        return is_canceled and self._canceler.is_cancelled

    def _watch(self) -> None:
        """Look for failures and ends of other ranks, until this one leaves."""
        size, lost = self.world.size, TimeLimits().lost
        others = set(range(size)) - {self.world.rank}
        seen = dict.fromkeys(others, time.monotonic())
        while not self._is_over.wait(max(_TICK, _TICK * size / _MANY)):
            generation = self._generation
            if self._store.get(f"{_FAILED}{generation}") is not None:
                with self._lock:
                    if generation == self._generation and not self._is_telling:
                        self._canceler.start_cancel()
            for rank in others:
                error = _find_end(rank)
                if error is None or self._is_over.is_set():
                    seen[rank] = time.monotonic()
                elif _GONE in error or time.monotonic() - seen[rank] > lost:
                    self._is_aborted = True
                    private.abort_collectives(f"{SHUT_DOWN}: rank {rank} has ended.")
                    return
        time.sleep(_LEAVE_SECONDS)
        self._canceler.start_cancel()  # `leave` waits no longer

    def leave(self) -> None:
        """Wait a moment until all ranks leave, so that none waits for the last bytes.

        A rank that fails does not wait.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        if not hasattr(sys, "last_value"):
            with contextlib.suppress(Exception):  # the other ranks may have ended
                self._run("allgather", tf.constant([0]), "keras_dist.leave")


def _find_generation() -> Any:
    """Return the variable with the generation: no graph has to capture it."""
    name = "keras_dist.generation"
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)


def _find_end(rank: int) -> str | None:
    """Return why a rank cannot be reached; `None` if it can, or is only slow."""
    try:
        private.check_worker(rank, _ANSWER_SECONDS)
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError) as error:
        return str(error)
    except tf.errors.OpError:
        pass
    return None


def _count_parts(tensor: Any) -> int:
    """Return in how many messages a tensor travels, if its size is known."""
    num_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return max(1, -(-num_bytes // _MOST_BYTES))


def _split(flat: Any, num_parts: int) -> list[Any]:
    """Divide a vector into parts of nearly the same length."""
    if num_parts == 1:
        return [flat]
    sizes = tf.stack(_divide(tf.size(flat), num_parts))
    return list(tf.split(flat, sizes, num=num_parts))


def _divide(count: Any, num_parts: int) -> list[Any]:
    """Return the sizes of parts of nearly the same length, the larger ones first."""
    each, more = count // num_parts, count % num_parts
    return [each + tf.cast(number < more, tf.int32) for number in range(num_parts)]


def _scale(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tf.cast(tensor, tf.float64) * factor
