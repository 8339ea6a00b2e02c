"""Call a function on many ranks of a Spark cluster: `keras_dist.spark.run`."""

import importlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from keras_dist.launch.call_agent import runner
from keras_dist.launch.calls import Workers, cause_in, run_calls
from keras_dist.launch.coordinator import Plan
from keras_dist.launch.function import pickled_call

# Seconds in which Spark has to end a job that was canceled.
_CANCEL_SECONDS = 20.0

# Seconds after the end of a job in which an agent may say which task was killed.
_KNOWN_SECONDS = 3.0

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    start_timeout: float = 300.0,
) -> list[Result]:
    """Call `function` on ranks of a Spark cluster; return what each one returned.

    The ranks are tasks of one barrier stage of the active session, so that all run at
    once or none. Each is a process that its task starts: the objects of Spark are not
    there. The data stays what the function reads; write a `DataFrame` to files first.
    What the ranks print is in the logs of the executors.

    Needs PySpark (`pip install keras_dist[spark]`), and keras_dist with its Horovod in
    the Python of all executors. These have to reach the driver's host.

    Args:
        function: The function that every rank calls. A function of a notebook or script
            is copied to the ranks by value, one of a module is imported there by name.
        args, kwargs: Arguments of the function, the same on every rank.
        num_proc: Number of ranks; by default `spark.default.parallelism`. A rank has
            `spark.task.cpus` cores, and the GPUs of `spark.task.resource.gpu.amount`.
        start_timeout: Seconds to wait until all tasks have been started.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        Exception: The error of the rank that failed first. Its cause is a
            `RuntimeError` with the traceback on that rank, and what the others did.
        ImportError: If PySpark is not installed.
        RuntimeError: If a rank or its task was killed, or an executor was lost; or if
            there is no active session.
        TimeoutError: If the cluster has not started all tasks in time.
        ValueError: If `num_proc` is too small.

    Example:

        losses = keras_dist.spark.run(train, args=[1e-3], num_proc=4)
    """
    context = _context()
    size = context.defaultParallelism if num_proc is None else num_proc
    if size < 1:
        raise ValueError(f"At least one rank is needed. Received: num_proc={num_proc}")
    plan = Plan(
        num_hosts=size,
        restarts=0,
        timeout=start_timeout,
        is_announced=True,
        is_raised=True,
    )
    tasks = _SparkTasks(context, size, pickled_call(function, args, kwargs))
    return run_calls(
        tasks, plan, context.getConf().get("spark.driver.host", "127.0.0.1")
    )


def _context() -> Any:
    """The context of the active session."""
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError as error:
        raise ImportError(
            f"keras_dist.spark needs PySpark. Received: {error}. "
            "Run: pip install 'keras_dist[spark]'"
        ) from error
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise RuntimeError(
            "There is no active Spark session in this process. Received: none, or one "
            "of Spark Connect, which has no barrier stages. Make one first, by "
            "`SparkSession.builder.getOrCreate()`."
        )
    return context


class _SparkTasks(Workers):
    """The tasks of a barrier stage, and the thread that waits for it.

    Args:
        context: The context of Spark.
        size: Number of tasks.
        call: What the ranks call.
    """

    def __init__(self, context: Any, size: int, call: bytes) -> None:
        super().__init__("Spark task")
        self._context, self._size, self._call = context, size, call
        self._group = f"keras_dist {secrets.token_hex(4)}"
        self._found: list[bytes] = []
        self._error, self._error_at = "", 0.0
        self._thread: Any = None

    def begin_wait(self) -> None:
        """Start the stage."""
        headers = self.begin([], number=self._size)
        threads = importlib.import_module("pyspark")
        self._thread = threads.InheritableThread(
            target=self._collect, args=[headers], daemon=True
        )
        self._thread.start()

    def _collect(self, headers: Sequence[Mapping[str, Any]]) -> None:
        context = self._context
        context.setJobGroup(self._group, "keras_dist.spark.run", interruptOnCancel=True)
        try:
            call = context.broadcast(self._call)
            stage = context.parallelize(range(self._size), self._size).barrier()
            self._found = stage.mapPartitions(_task(runner(), headers, call)).collect()
            call.destroy()
        except Exception as error:  # whatever Py4J raises
            self._error_at = time.monotonic()
            self._error = str(error) or type(error).__name__

    def poll(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            return
        for answer in self._found:
            self.take(answer)
        self._found = []
        if found := cause_in(self._error):
            self.note_lost(*found)
        # An agent may know more of it than Spark.
        if self._error and time.monotonic() - self._error_at > _KNOWN_SECONDS:
            self.note_all_lost(_reason(self._error))
        time.sleep(seconds)

    def is_running(self) -> bool:
        return self._thread.is_alive() or bool(self._found)

    def late_text(self, missing: str, seconds: float) -> str:
        return (
            f"Spark has not started all tasks of the barrier stage within {seconds:g} "
            f"s. Received: {self._size} tasks, in a cluster with "
            f"{self._context.defaultParallelism} cores. All tasks have to run at once: "
            "start fewer, or add executors."
        )

    def close(self) -> None:
        """End what is left of the stage."""
        if self._thread is not None and self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join(_CANCEL_SECONDS)


def _task(
    run_agent: Callable[[Mapping[str, Any], bytes], bytes],
    headers: Sequence[Mapping[str, Any]],
    call: Any,
) -> Callable[[Iterator[int]], Iterator[bytes]]:
    """What each task of the stage does; is pickled by value, with nothing of ours."""

    def run_task(rows: Iterator[int]) -> Iterator[bytes]:
        context = importlib.import_module("pyspark").BarrierTaskContext.get()
        hosts = [each.address.rpartition(":")[0] for each in context.getTaskInfos()]
        gpus = context.resources().get("gpu")
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        number = context.partitionId()
        yield run_agent({**headers[number], "host": hosts[number]}, call.value)

    return run_task


def _reason(error: str) -> str:
    """The line of an error of Java that says what happened."""
    lines = [line.strip() for line in error.splitlines()]
    found = [line for line in lines if line.startswith(("org.apache.spark", ":"))]
    return (found or lines)[0].removeprefix(": ")
