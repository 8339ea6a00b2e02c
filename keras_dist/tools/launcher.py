"""Run `keras-dist run` as a process, end it, and tell why it failed."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Seconds in which the launcher ends its ranks, after Ctrl-C and after SIGTERM.
_END_SECONDS = 20.0

# What the launcher's own messages begin with; and how many lines of others, and how
# many characters, are shown.
_OWN = "keras-dist: "
_MOST_LINES, _MOST_CHARACTERS = 3, 600

# The launcher's last line where the cause is in the line before.
_WITHOUT_CAUSE = r"^no ranks could be run on|without a Python error"


def start(
    words: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[Any]:
    """Start `keras-dist run`.

    Args:
        words: Arguments of the command.
        environment: Environment variables in addition to those of this process.
        **streams: Further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "keras_dist", "run", *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this command, which ends the other
        **streams,
    )


def end(process: subprocess.Popen[Any]) -> None:
    """End a launcher and its ranks: by Ctrl-C, then by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            has_ended(process, _END_SECONDS)


def has_ended(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Wait at most so many seconds for the end of a process."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def given_words(
    options: argparse.Namespace, *groups: Callable[[argparse.ArgumentParser], Any]
) -> list[str]:
    """Return options of `keras-dist run` as they were given to another command.

    Args:
        options: The parsed options of the other command.
        *groups: Functions that add the options to a parser.
    """
    known = argparse.ArgumentParser(add_help=False)
    for add in groups:
        add(known)
    words = []
    for action in known._actions:
        value = getattr(options, action.dest)
        if value != action.default:
            words.append(action.option_strings[0])
            words += [] if action.nargs == 0 else [str(value)]
    return words


def reason_in(errors: str) -> str:
    r"""Return the cause in the messages of a launcher and its ranks, without stacks.

    >>> reason_in("keras-dist: rank 1 failed first, here.\n  File\nRank 1: no disk\n")
    'rank 1 failed first, here: no disk'
    >>> reason_in("keras-dist: no way to b\nkeras-dist: no ranks could be run on b.")
    'no way to b; no ranks could be run on b.'
    """
    before, found, last = errors.rpartition(_OWN)
    if not found:
        return _shortened(" ".join(last.split("\n")[-_MOST_LINES:]))
    text = last.partition("\n")[0]
    summary = re.search(r"^Rank \d+(?: on \S+)?: (.*)", last, re.MULTILINE)
    if summary:
        text = f"{text.rstrip('.')}: {summary[1]}"
    if re.search(_WITHOUT_CAUSE, text) and _OWN in before:
        earlier = before.rpartition(_OWN)[2].partition("\n")[0]
        text = f"{earlier.rstrip('.')}; {text}"
    return _shortened(text)


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    text = " ".join(text.split())
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"
