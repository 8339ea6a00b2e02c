"""Lines and warnings for the user beside the plan, the progress bar and failures.

They go to the standard library's logger `keras_dist`, which shows them on standard
output. To turn them off: `logging.getLogger("keras_dist").setLevel(logging.WARNING)`.
"""

import logging
import re
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

_logger = logging.getLogger("keras_dist")

# Files that begin with one of these are not the user's code, nor those in a folder in
# which packages are installed: one of the user's, of a container, of the system.
_FOREIGN = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<frozen")
_INSTALLED = re.compile(r"/(site|dist)-packages/")


class _StandardOutput(logging.Handler):
    """Writes to what is standard output now, in whatever encoding it has."""

    def emit(self, record: logging.LogRecord) -> None:
        show(self.format(record))


def say(line: str) -> None:
    """Log a line of information.

    Args:
        line: The line, without its end.
    """
    if not _logger.handlers:  # none of the user's either
        _logger.addHandler(_StandardOutput())
        _logger.propagate = False
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)
    _logger.info(line)


def show(text: str) -> None:
    """Print a text; a terminal whose encoding lacks a character shows `?` for it.

    Args:
        text: The text, without its last line end.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def warn(text: str) -> None:
    """Warn at the line of the user's code that is running.

    Args:
        text: What happened, what was received, and what to do.
    """
    levels = enumerate(reversed(traceback.extract_stack()), 1)
    level = next((n for n, e in levels if is_users(e.filename)), 2)
    warnings.warn(text, stacklevel=level)


def is_users(file: str) -> bool:
    """Return True if a file is neither of a package nor of Python."""
    modules = map(sys.modules.get, ("keras", "tensorflow", "horovod"))
    folders = [str(Path(m.__file__).parent) for m in modules if m and m.__file__]
    return not (file.startswith((*_FOREIGN, *folders)) or _INSTALLED.search(file))


def find_caller() -> str:
    """Return the line of the user's code that is running, for messages of ranks.

    The file has no folder, which may differ from host to host.
    """
    for entry in reversed(traceback.extract_stack()):
        if is_users(entry.filename):
            return f"{Path(entry.filename).name}, line {entry.lineno}"
    return "an unknown line"
