"""`keras_dist.run`: call a function on many ranks, from Python."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

# Files of a call: function and arguments; what a rank returned.
CALL, _RESULT = "call.pickle", "result.{rank}.pickle"

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    restarts: int = 0,
    stall_limit: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Result]:
    """Call `function` on `np` ranks of this host, and return what each one returned.

    The ranks are new processes, which end with the call; this process is not a rank. So
    a notebook can train on many ranks.

    Args:
        function: The function that every rank calls. A function of a notebook or script
            is copied to the ranks by value, one of a module is imported there by name.
        args, kwargs: Arguments of the function, the same on every rank.
        np: Number of ranks.
        restarts: Start the job again after a failure, at most so often.
        stall_limit: The job ends if no rank makes progress for this many seconds; 0
            turns this off. By default 120.
        log_dir: Folder for a log file of each rank; by default all ranks print here.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        RuntimeError: If a rank failed; its error is printed before.
        ValueError: If `np` or `restarts` is too small.

    Example:

        def train(rate):
            model = make_model(rate)
            history = keras_dist.dist_fit(model, x, y, epochs=5)
            return history.history["loss"][-1]

        losses = keras_dist.run(train, args=[1e-3], np=4)
    """
    if np < 1 or restarts < 0:
        raise ValueError(
            "At least one rank is needed, and no negative number of restarts. "
            f"Received: np={np}, restarts={restarts}"
        )
    # Only this user can write to this folder, so its files are safe to unpickle.
    with tempfile.TemporaryDirectory(prefix="keras_dist.") as folder:
        (Path(folder) / CALL).write_bytes(pickled_call(function, args, kwargs))
        command = [sys.executable, "-m", "keras_dist", "run", "-np", str(np)]
        command += ["--restarts", str(restarts), "--with-parent", str(os.getpid())]
        if stall_limit is not None:
            command += ["--stall-limit", str(stall_limit)]
        if log_dir is not None:
            command += ["--log-dir", os.fspath(log_dir)]
        command += ["-m", "keras_dist.comm.worker", folder]
        _wait(command)
        return [_result(folder, rank) for rank in range(np)]


def _wait(command: Sequence[str]) -> None:
    # The ranks can import what this process can import.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()  # until all ranks have ended
        raise
    if code:
        raise RuntimeError(
            "A rank has failed; its own error was printed above. "
            f"Received: exit code {code}."
        )


def pickled_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Return what a rank has to call, for `call_and_keep`.

    Args:
        function, args, kwargs: See `run`.
    """
    return _pickled((function, tuple(args), dict(kwargs or {})))


def _pickled(value: Any) -> bytes:
    try:
        # Is installed with Horovod, and can also pickle functions of notebooks.
        return importlib.import_module("cloudpickle").dumps(value)
    except ImportError:
        return pickle.dumps(value)


def _result(folder: str, rank: int) -> Any:
    path = Path(folder) / _RESULT.format(rank=rank)
    return pickle.loads(path.read_bytes())


def call_and_keep(folder: str, rank: int) -> None:
    """On a rank, call the function of `run`, and write what it returned to a file.

    Args:
        folder: The folder of `run`, with the pickled function and arguments.
        rank: This rank.
    """
    function, args, kwargs = pickle.loads((Path(folder) / CALL).read_bytes())
    value = _pickled(function(*args, **kwargs))
    path = Path(folder) / _RESULT.format(rank=rank)
    draft = path.with_suffix(".draft")
    draft.write_bytes(value)
    draft.replace(path)
