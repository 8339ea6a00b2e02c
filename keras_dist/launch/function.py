"""`keras_dist.run`: call a function on many ranks, from Python."""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from keras_dist.launch.monitor.rank_process import PATHS
from keras_dist.launch.monitor.record import make_file, name_file

_LAUNCH = f"""
import os, sys
sys.path[:] = os.environ["{PATHS}"].split(os.pathsep)
from keras_dist.__main__ import main
sys.exit(main())
"""

Result = TypeVar("Result")


def run(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
) -> list[Result]:
    """Call `function` on `np` ranks of this host, and return the results of all.

    The ranks are new processes, which end when the call returns; this process is not a
    rank. So a notebook can train on many ranks.

    Args:
        function: The function that every rank calls. A function defined in a notebook
            or script is copied to the ranks; a function of a module is imported there.
        args, kwargs: Arguments of the function, the same on every rank.
        np: Number of ranks.

    Returns:
        The return values of all ranks, in rank order.

    Raises:
        RuntimeError: If a rank failed. Its error is printed first.
        ValueError: If `np` is less than 1.

    Example:

        def train(rate):
            model = make_model(rate)
            history = keras_dist.dist_fit(model, x, y, epochs=5)
            return history.history["loss"][-1]

        losses = keras_dist.run(train, args=[1e-3], np=4)
    """
    if np < 1:
        raise ValueError(f"At least one rank is needed. Received: np={np}")
    # Only this user can write to these files, so they are safe to unpickle.
    call, *results = files = [make_file() for _ in range(np + 1)]
    write(name_file(call), (function, tuple(args), dict(kwargs or {})))
    command = [sys.executable, "-c", _LAUNCH, "run", "-np", str(np)]
    command += ["--with-parent", str(os.getpid())]
    command += ["-m", "keras_dist.launch.call", *map(name_file, files)]
    # The ranks can import what this process can import.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(command, env={**os.environ, PATHS: paths})
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
    return [pickle.load(result) for result in results]


def write(path: str, value: Any) -> None:
    """Pickle a value, also a function of a notebook, into a file."""
    # Only here: the ranks, and commands, need not wait for its import.
    Path(path).write_bytes(importlib.import_module("cloudpickle").dumps(value))
