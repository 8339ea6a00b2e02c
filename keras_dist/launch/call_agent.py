"""Run one rank that calls a function: started in an actor of Ray, or a task of Spark.

Actor and task are Python processes that TensorFlow and Horovod must not end or occupy:
Spark uses its own again, and a crash of Horovod would end them without a word. So they
start this agent, and the agent the rank, in a process of its own that is watched and
reported as under `keras-dist run`.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keras_dist.launch import horovod_library, processes
from keras_dist.launch.calls import (
    HOST,
    LEFT,
    LOST_AGENT,
    NO_PACKAGE,
    REPORT,
    SAVE,
    STOP,
)
from keras_dist.launch.failures import Report
from keras_dist.launch.function import CALL, outcome_in
from keras_dist.launch.heartbeat import Heartbeat
from keras_dist.launch.hosts import slots_of_workers
from keras_dist.launch.network import address_towards, check_own_name, check_reach
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import Assignment, Command, connect_timeout, run_ranks
from keras_dist.launch.store import StoreClient, client_of

# Seconds between two looks for what the driver asks.
_LOOK_SECONDS = 1.0

# What Ray and Spark set to the number of cores of a worker, and where TensorFlow, which
# would take all cores of the host, looks for it.
_CORES, _THREADS = "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"


def runner() -> Callable[[Mapping[str, Any], bytes], bytes]:
    """What an actor or task calls: it starts the agent, and returns what it answers.

    It is a function inside of a function, which is pickled by value, with nothing of
    ours in it: so the process of the actor or task does not import TensorFlow.
    """

    lost, none = LOST_AGENT, NO_PACKAGE  # by value

    def run_agent(header: Mapping[str, Any], call: bytes) -> bytes:
        # Of `slots_of_workers`, which is not there.
        hosts = header["hosts"]
        by_rank = sorted(range(len(hosts)), key=lambda each: hosts.index(hosts[each]))
        rank = by_rank.index(header["worker"])
        if importlib.util.find_spec("keras_dist") is None:
            raise RuntimeError(f"rank {rank} {none}, {sys.executable}")
        reader, writer = os.pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "keras_dist", "call-agent", str(writer)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        line = json.dumps({**header, "bytes": len(call)}).encode() + b"\n"
        try:
            with open(reader, "rb") as answer:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line + call)
                    process.stdin.flush()
                received = answer.read()
        finally:  # the agent ends its rank when its input ends
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        if not received:
            raise RuntimeError(f"rank {rank} {lost}")
        return received

    return run_agent


def serve_call(descriptor: int) -> int:
    """Read what to call from standard input, run the rank, and write how it ended.

    The input is a line of JSON, the header, and the pickled call; its end stops the
    rank. What is written is a line of JSON, the report, and the pickled value or error.

    Args:
        descriptor: File descriptor to write to.
    """
    header = json.loads(sys.stdin.buffer.readline())
    call = sys.stdin.buffer.read(header["bytes"])
    slot = slots_of_workers(header["hosts"])[header["worker"]]
    assignment = Assignment(
        slots=[slot],
        store=header["store"],
        secret=header["secret"],
        restart=header["restart"],
        seed=header["seed"],
        has_peers=True,
    )
    job = f"{header['job']}_{slot.rank}"
    store = client_of(assignment.store)
    assert store is not None
    store.put(f"{HOST}.{slot.rank}", slot.host)
    outcome = b""
    over = threading.Event()
    with processes.reaper(job), stopped_by_signals() as stopped:
        try:
            address = _checked(header["address"], assignment)
            _watch(store, slot.rank, stopped, over)
            folder = processes.make_folder(job)
            (folder / CALL).write_bytes(call)
            command = _command(folder, header["environment"])
            report = run_ranks(
                command, assignment, job, address=address, stopped=stopped
            )
            outcome = outcome_in(folder, slot.rank)
        except (OSError, ValueError) as error:
            report = Report(error=str(error))
        over.set()
        store.put_surely(f"{REPORT}.{slot.rank}", report.values())
    line = json.dumps({"rank": slot.rank, "report": report.values()})
    with open(descriptor, "wb") as answer:
        answer.write(line.encode() + b"\n" + outcome)
    return 0


def _checked(towards: str, assignment: Assignment) -> str:
    """Check that this rank could take part; return the address of its host."""
    check_reach(towards, int(assignment.store["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    own = address_towards(towards)
    if not horovod_library.uses_named_network():
        check_own_name(own)
    return own


def _command(folder: Path, variables: Mapping[str, str]) -> Command:
    environment = {**variables, **connect_timeout()}
    if _CORES in os.environ and _THREADS not in os.environ:
        environment[_THREADS] = os.environ[_CORES]
    return Command("module", ["keras_dist.comm.worker", str(folder)], environment)


def _watch(
    store: StoreClient, rank: int, stopped: list[int], over: threading.Event
) -> None:
    """Stop the rank when actor or task end, when the driver asks for it, or is lost."""

    def wait_for_end() -> None:
        # Not by `sys.stdin`, whose lock this thread would hold when the agent exits.
        while os.read(sys.stdin.fileno(), 1):
            pass
        if not over.is_set():
            store.put(f"{LEFT}.{rank}", True)
            stopped.append(signal.SIGHUP)

    def wait_for_stop() -> None:
        while not (stopped or over.is_set()):
            if (asked := store.get(STOP)) is not None:
                stopped.append(signal.SIGTERM if asked == SAVE else signal.SIGHUP)
            time.sleep(_LOOK_SECONDS)

    for wait in (wait_for_end, wait_for_stop):
        threading.Thread(target=wait, daemon=True).start()
    Heartbeat(store, str(rank), lambda: stopped.append(signal.SIGHUP)).start()
