"""What a rank of `keras-dist run` does first, and what it says when it fails.

The launcher runs this file by its path, in front of the user's script: before anything
is imported, and without TensorFlow, so that every error of the script is seen.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

# Where the launcher expects what this rank says: files that begin with this path.
VARIABLE = "KERAS_DIST_REPORT"

# The launcher prints the first error itself, and the others as one line each.
QUIET = "KERAS_DIST_QUIET"

# An error that says so was heard of, and has its cause on another rank.
_FROM_ANOTHER_RANK = (
    "Another rank has ended while this one waited",
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
)
_PR_SET_PDEATHSIG = 1

# The signal at which a rank writes its stacks: one that no scheduler sends.
ASK = signal.SIGRTMIN + 7


def write(kind: str, message: str, text: str, *, is_secondary: bool) -> None:
    """Say once why this rank fails; what is said later is not the reason.

    Args:
        kind: Of the error: the name of its class.
        message: Its text.
        text: The whole of it, to be printed.
        is_secondary: Whether its cause is on another rank.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    said = {"time": time.time(), "kind": kind, "message": message, "text": text}
    draft = Path(f"{path}.{os.getpid()}.draft")
    with contextlib.suppress(OSError):  # said already, or the launcher is gone
        draft.write_text(json.dumps(said | {"is_secondary": is_secondary}))
        os.link(draft, f"{path}.json")  # whole or not at all, and the first stays


def write_error(error: BaseException) -> None:
    """Say that this error ends the rank."""
    message = str(error)
    is_secondary = message.startswith("On rank ") or any(
        words in message for words in _FROM_ANOTHER_RANK
    )
    lines = traceback.format_exception(type(error), error, _own(error.__traceback__))
    write(type(error).__name__, message, "".join(lines), is_secondary=is_secondary)


def _own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without what this file and `runpy` have put before it."""
    foreign = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in foreign:
        trace = trace.tb_next
    return trace


def _print(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    is_said = Path(f"{os.environ.get(VARIABLE)}.json").exists()
    if not (is_said and os.environ.get(QUIET)):
        sys.__excepthook__(kind, error, _own(trace))


def end_with(parent: int) -> None:
    """Let this process end when its launcher does, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before this was said
        os._exit(1)


def _listen() -> None:
    """Write stacks where the launcher reads them: when asked, and before a crash."""
    path = os.environ.get(VARIABLE)
    if path:
        faulthandler.enable(open(f"{path}.crash", "w"))  # noqa: SIM115
        stacks = open(f"{path}.stacks", "w")  # noqa: SIM115
        faulthandler.register(ASK, stacks, all_threads=True)


def _run_script(path: str) -> None:
    sys.path[0] = str(Path(path).resolve().parent)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def main(arguments: list[str]) -> None:
    """Run the user's command in this process.

    Args:
        arguments: The launcher's process, what the command is ("script", "module",
            "program"), and the command.
    """
    parent, kind, *command = arguments
    end_with(int(parent))
    if kind == "program":
        os.execvp(command[0], command)
    _listen()
    sys.excepthook = _print
    sys.argv = command
    try:
        if kind == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(command[0])
    except SystemExit as error:
        if error.code not in (None, 0):
            write_error(error)
        raise
    except BaseException as error:  # whatever ends the rank
        write_error(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
