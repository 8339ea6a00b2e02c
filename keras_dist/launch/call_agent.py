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
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keras_dist.launch import processes
from keras_dist.launch.agent import JOIN_SECONDS, agent_of, header_of
from keras_dist.launch.calls import LOST_AGENT, NO_PACKAGE
from keras_dist.launch.function import CALL, outcome_in
from keras_dist.launch.network import check_reach
from keras_dist.launch.processes import stopped_by_signals
from keras_dist.launch.ranks import connect_timeout

# What Ray and Spark set to the number of cores of a worker, and where TensorFlow, which
# would take all cores of the host, looks for it.
_CORES, _THREADS = "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"


def runner() -> Callable[[Mapping[str, Any], bytes], bytes]:
    """Return what an actor or task calls: it starts the agent, and returns its answer.

    It is a function inside of a function, which is pickled by value, with nothing of
    ours in it: so the process of the actor or task does not import TensorFlow.
    """

    lost, none = LOST_AGENT, NO_PACKAGE  # by value

    def run_agent(header: Mapping[str, Any], call: bytes) -> bytes:
        name = header["name"]
        if importlib.util.find_spec("keras_dist") is None:
            raise RuntimeError(f"agent {name} {none}, {sys.executable}")
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
        lines = f"{json.dumps(header)}\n{len(call)}\n".encode()
        try:
            with open(reader, "rb") as answer:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(lines + call)
                    process.stdin.flush()
                received = answer.read()
        finally:  # the agent ends its rank when its input ends
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        if not received:
            raise RuntimeError(f"agent {name} {lost}")
        return received

    return run_agent


def serve_call(descriptor: int) -> int:
    """Read what to call from standard input, take part in the job, and answer.

    The input is a line with the header, a line with the number of bytes of the pickled
    call, and the call; its end ends the rank. The answer is a line of JSON, the id of
    the agent and why it could not run a rank, and the pickled value or error.

    Args:
        descriptor: File descriptor to write the answer to.
    """
    header = header_of(sys.stdin.buffer.readline())
    call = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    outcome, problem = b"", ""
    is_over = threading.Event()
    with processes.reaper(header.job), stopped_by_signals() as stopped:
        folder = processes.make_folder(header.job)
        (folder / CALL).write_bytes(call)
        words = [*header.command.words, str(folder)]
        environment = {**header.command.environment, **connect_timeout()}
        if _CORES in os.environ and _THREADS not in os.environ:
            environment[_THREADS] = os.environ[_CORES]
        command = replace(header.command, words=words, environment=environment)
        try:
            check_reach(header.address, header.port)
            agent = agent_of(header, stopped)

            def wait_for_end() -> None:
                # Not by `sys.stdin`, whose lock it would hold when the agent exits.
                while os.read(sys.stdin.fileno(), 1):
                    pass
                if not is_over.is_set():
                    agent.cut(is_told=True)

            threading.Thread(target=wait_for_end, daemon=True).start()
            if agent.join(JOIN_SECONDS):
                agent.follow(command, header.job)
        except (OSError, ValueError) as error:
            problem = str(error)
        is_over.set()
        outcome = outcome_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
    line = json.dumps({"name": header.name, "problem": problem}).encode()
    with open(descriptor, "wb") as answer:
        answer.write(line + b"\n" + outcome)
    return 0
