"""A debugger in one rank, for `keras-dist run --debug`.

Run by its path: the package is not imported before the script. It imports nothing but
the standard library, and debugpy where a port is given.
"""

import importlib
import inspect
import os
import pdb
import sys
import types
from collections.abc import Mapping
from typing import Any


def attach(given: Mapping[str, Any], path: str | None) -> None:
    """Wait for a debugger in the rank that was named; leave all others alone.

    At `breakpoint()` the other ranks do not stop: they have no terminal.

    Args:
        given: "rank", and the "port" or "terminal" of its debugger.
        path: The script, in whose first line a debugger on the terminal stops; `None`
            for a module, where it stops at `breakpoint()` only.
    """
    if os.environ.get("HOROVOD_RANK") != str(given["rank"]):
        sys.breakpointhook = _go_on
        return
    if "port" in given:
        _wait_for_client(given["rank"], given["port"])
    else:
        _stop_in_first_line(given["terminal"], path)


def _go_on(*arguments: Any, **options: Any) -> None:
    """Stand in the place of `breakpoint` on the other ranks."""


def _wait_for_client(rank: int, port: int) -> None:
    debugpy = importlib.import_module("debugpy")
    debugpy.listen(("127.0.0.1", port))
    print(f"rank {rank} waits for a debugger at 127.0.0.1:{port}", flush=True)
    debugpy.wait_for_client()


def _stop_in_first_line(terminal: str, path: str | None) -> None:
    """Let `pdb` read from and write to the launcher's terminal.

    A rank has a session of its own, so the terminal has to be opened by its name.
    """
    streams = open(terminal), open(terminal, "w")  # noqa: SIM115
    debugger = pdb.Pdb(stdin=streams[0], stdout=streams[1], nosigint=True)
    debugger.use_rawinput = False

    def stop(*arguments: Any, **options: Any) -> None:
        here = inspect.currentframe()
        debugger.set_trace(here and here.f_back)

    def after_error(
        kind: type[BaseException], error: BaseException, trace: Any
    ) -> None:
        before(kind, error, trace)
        debugger.reset()
        debugger.interaction(None, trace)

    before, sys.excepthook = sys.excepthook, after_error
    sys.breakpointhook = stop
    if path is None:
        return
    debugger.reset()
    debugger.botframe = inspect.currentframe()
    debugger.set_break(path, _first_line(path), temporary=True)
    debugger.set_continue()
    sys.settrace(debugger.trace_dispatch)


def _first_line(path: str) -> int:
    """Return the first line of a script that is run, behind its docstring."""
    with open(path, "rb") as file:
        code: types.CodeType = compile(file.read(), path, "exec")
    lines = sorted({line for *_, line in code.co_lines() if line})
    has_docstring = code.co_consts[:1] and isinstance(code.co_consts[0], str)
    return lines[1] if has_docstring and len(lines) > 1 else lines[0]
