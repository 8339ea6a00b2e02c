"""What a rank runs: a script, a module, or a program."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The kind of a command (script, module or program), and its words without Python.

    `python script.py` counts as a script, so that its errors are reported.

    Raises:
        ValueError: If there is no such file or program.
    """
    found = Path(shutil.which(words[0]) or "")
    # Not the resolved path, which is the same in several environments.
    is_here = found.absolute().parent == Path(sys.executable).parent
    is_python = is_here and found.name.startswith("python")
    if is_python and words[1:2] == ["-m"] and len(words) > 2:
        return "module", list(words[2:])
    if is_python and words[1:] and words[1].endswith(".py"):
        words = words[1:]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        return "script", list(words)
    if shutil.which(words[0]) is None:
        raise ValueError(f"There is no such script or program. Received: {words[0]}")
    return "program", list(words)
