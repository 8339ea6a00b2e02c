"""Python stacks of this process, and the line of the user's code in them."""

import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist.launch.monitor import record
from keras_dist.lines import FOREIGN

# The file that runs the user's script under `keras-dist run`.
_LAUNCHED_FILE = "keras_dist/launch/monitor/rank_process.py"

# The file in which Python waits for TensorFlow.
_WAITING_FILE = "tensorflow/python/eager/execute.py"


def text(*, exclude: threading.Thread) -> str:
    """Return the stacks of all Python threads, that of the training first.

    Args:
        exclude: A thread to leave out.
    """
    names = {thread.ident: f"thread {thread.name}" for thread in threading.enumerate()}
    names[threading.main_thread().ident] = "the main thread"
    texts = []
    for thread, stack in _stacks(exclude):
        entries = [e for e in stack if not e.filename.endswith(_LAUNCHED_FILE)]
        lines = "".join(traceback.format_list(entries))
        name = names.get(thread, f"thread {thread}")
        texts.append(f"Stack of {name} (most recent call last):\n{lines}")
    return "\n".join(texts)


def own_code(*, exclude: threading.Thread) -> str | None:
    """Return the line of the user's code that runs now, or `None` if TensorFlow runs.

    Two kinds of threads can run the user's code: the one that trains, and those in
    which TensorFlow calls the user's generator or `py_function` while it waits for the
    step.

    Args:
        exclude: A thread to leave out.
    """
    for thread, stack in _stacks(exclude):
        calls = [(each.filename, each.lineno, each.name) for each in reversed(stack)]
        is_py_function = any(file.endswith("ops/script_ops.py") for file, *_ in calls)
        is_candidate = thread == record.here.thread or is_py_function
        if is_candidate and (line := _find_line(calls)):
            return line
    return None


def _find_line(calls: Sequence[tuple[str, Any, str]]) -> str | None:
    """Find the user's code in calls, the most recent first; `None` in TensorFlow."""
    if not calls or calls[0][0].endswith(_WAITING_FILE):
        return None
    for file, line, name in calls:
        if not file.startswith(FOREIGN):
            return f"{file}, line {line}, in {name}"
    return None


def _stacks(
    exclude: threading.Thread,
) -> Iterator[tuple[int, traceback.StackSummary]]:
    """Identifiers and stacks of all threads but one, that of the training first."""
    frames = sys._current_frames()
    for thread in sorted(frames, key=lambda thread: thread != record.here.thread):
        if thread != exclude.ident:
            yield thread, traceback.extract_stack(frames[thread])
