"""`keras_dist.run`: call a function on many ranks, from Python."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CALL, _RESULT = "call.pickle", "result.{rank}.pickle"


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    restarts: int = 0,
    stall_limit: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call `function` on `np` ranks of this host, and return what each one returned.

    The ranks are processes of their own, which end with the call; this process takes no
    part. So a notebook can train on many ranks.

    Args:
        function: What every rank calls. It is copied by value where it stands in a
            notebook or script, and imported by name where it stands in a module.
        args, kwargs: Its arguments, the same on every rank.
        np: How many ranks.
        restarts: How often to start again after a failure.
        stall_limit: Seconds after which the job ends when no rank makes progress, 0
            for never; by default 120.
        log_dir: Where to write what each rank prints; by default all print here.

    Returns:
        The values of all ranks, in rank order.

    Raises:
        RuntimeError: If a rank failed; its own error was printed.
        ValueError: If a number is too small.

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
    # A folder of this user alone: what is unpickled from it nobody else has written.
    with tempfile.TemporaryDirectory(prefix="keras_dist.") as folder:
        call = Path(folder) / _CALL
        call.write_bytes(_pickled((function, tuple(args), dict(kwargs or {}))))
        command = [sys.executable, "-m", "keras_dist", "run", "-np", str(np)]
        command += ["--restarts", str(restarts), "--with-parent", str(os.getpid())]
        if stall_limit is not None:
            command += ["--stall-limit", str(stall_limit)]
        if log_dir is not None:
            command += ["--log-dir", os.fspath(log_dir)]
        command += ["-m", "keras_dist.launch.worker", folder]
        _wait(command)
        return [_result(folder, rank) for rank in range(np)]


def _wait(command: Sequence[str]) -> None:
    # The ranks import what this process could import.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()  # until all ranks are gone
        raise
    if code:
        raise RuntimeError(
            "A rank has failed; its own error was printed above. "
            f"Received: exit code {code}."
        )


def _pickled(value: Any) -> bytes:
    try:
        # Comes with Horovod, and takes functions of notebooks and scripts, too.
        return importlib.import_module("cloudpickle").dumps(value)
    except ImportError:
        return pickle.dumps(value)


def _result(folder: str, rank: int) -> Any:
    path = Path(folder) / _RESULT.format(rank=rank)
    return pickle.loads(path.read_bytes())


def call_and_keep(folder: str, rank: int) -> None:
    """On a rank: make the call that lies in a folder, and leave its value there."""
    function, args, kwargs = pickle.loads((Path(folder) / _CALL).read_bytes())
    value = _pickled(function(*args, **kwargs))
    path = Path(folder) / _RESULT.format(rank=rank)
    draft = path.with_suffix(".draft")
    draft.write_bytes(value)
    draft.replace(path)
