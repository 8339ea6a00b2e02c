"""The Python stacks of this process, and which of them is the user's."""

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

MAIN = "the main thread"

_OURS = str(Path(__file__).parents[1])
_FOREIGN = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    _OURS,
    "<frozen",
)

_FRONT = "keras_dist/watch/report.py"

# Where Python waits for TensorFlow.
_WAITS = "tensorflow/python/eager/execute.py"

_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def text(*, without: threading.Thread) -> str:
    """The stacks of all threads that run Python, the main one first.

    Args:
        without: A thread that is of no interest.
    """
    pieces = []
    for name, frame in _frames(without):
        entries = traceback.extract_stack(frame)
        # What the launcher has put in front of the user's script.
        users = [entry for entry in entries if not entry.filename.endswith(_FRONT)]
        stack = "".join(traceback.format_list(users))
        pieces.append(f"Stack of {name} (most recent call last):\n{stack}")
    return "\n".join(pieces)


def own_code(*, without: threading.Thread) -> str | None:
    """Where this process is in the user's own code, or `None` where TensorFlow works.

    Inside a step the main thread waits for TensorFlow, and what the user's generator or
    `py_function` does stands on another one.
    """
    for name, frame in _frames(without):
        stack = traceback.extract_stack(frame)
        files = [entry.filename for entry in stack]
        in_tensorflow = files[-1].endswith(_WAITS)
        is_called_by_it = any(file.endswith("ops/script_ops.py") for file in files)
        is_users = name == MAIN or is_called_by_it
        if in_tensorflow or not is_users:
            continue
        for entry in reversed(stack):
            if not entry.filename.startswith(_FOREIGN):
                return f"{entry.filename}, line {entry.lineno}, in {entry.name}"
    return None


def line_of(dump: str) -> str | None:
    """Where the user's code is, of a dump of `faulthandler`; `None` in TensorFlow.

    The main thread comes last there, and its last call first.

    >>> line_of('Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n')
    'a.py, line 3, in f'
    """
    calls = _CALL.findall(dump.rpartition("(most recent call first):")[2])
    if not calls or calls[0][0].endswith(_WAITS):
        return None
    for file, line, name in calls:
        if not file.startswith(_FOREIGN):
            return f"{file}, line {line}, in {name}"
    return None


def _frames(without: threading.Thread) -> Iterator[tuple[str, FrameType]]:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    if main in frames:
        yield MAIN, frames[main]
    for thread, frame in frames.items():
        if thread not in (main, without.ident):
            yield f"thread {names.get(thread, thread)}", frame
