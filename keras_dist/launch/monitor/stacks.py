"""Python stacks of this process, and the line of the user's code in them."""

import re
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

from keras_dist.lines import FOREIGN

MAIN = "the main thread"

# The file that runs the user's script under `keras-dist run`.
_LAUNCHED_FILE = "keras_dist/launch/monitor/rank_process.py"

# The file in which Python waits for TensorFlow.
_WAITING_FILE = "tensorflow/python/eager/execute.py"

_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def text(*, exclude: threading.Thread) -> str:
    """Return the stacks of all Python threads, the main thread first.

    Args:
        exclude: A thread to leave out.
    """
    texts = []
    for name, frame in _frames(exclude):
        entries = [
            entry
            for entry in traceback.extract_stack(frame)
            if not entry.filename.endswith(_LAUNCHED_FILE)
        ]
        stack = "".join(traceback.format_list(entries))
        texts.append(f"Stack of {name} (most recent call last):\n{stack}")
    return "\n".join(texts)


def own_code(*, exclude: threading.Thread) -> str | None:
    """Return the line of the user's code that runs now, or `None` if TensorFlow runs.

    Two kinds of threads can run the user's code: the main thread, and the threads in
    which TensorFlow calls the user's generator or `py_function` while the main thread
    waits for the step.

    Args:
        exclude: A thread to leave out.
    """
    for name, frame in _frames(exclude):
        stack = traceback.extract_stack(frame)
        files = [entry.filename for entry in stack]
        waits_for_tensorflow = files[-1].endswith(_WAITING_FILE)
        is_py_function = any(file.endswith("ops/script_ops.py") for file in files)
        if waits_for_tensorflow or not (name == MAIN or is_py_function):
            continue
        for entry in reversed(stack):
            if not entry.filename.startswith(FOREIGN):
                return f"{entry.filename}, line {entry.lineno}, in {entry.name}"
    return None


def line_of(dump: str) -> str | None:
    """Find the line of the user's code in a dump; `None` in TensorFlow.

    In a dump the main thread is the last one, and its most recent call comes first.

    >>> line_of('Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n')
    'a.py, line 3, in f'
    """
    calls = _CALL.findall(dump.rpartition("(most recent call first):")[2])
    if not calls or calls[0][0].endswith(_WAITING_FILE):
        return None
    for file, line, name in calls:
        if not file.startswith(FOREIGN):
            return f"{file}, line {line}, in {name}"
    return None


def _frames(exclude: threading.Thread) -> Iterator[tuple[str, FrameType]]:
    """Names and current frames of all threads but one, the main thread first."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    if main in frames:
        yield MAIN, frames[main]
    for thread, frame in frames.items():
        if thread not in (main, exclude.ident):
            yield f"thread {names.get(thread, thread)}", frame
