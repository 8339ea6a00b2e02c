"""Lines and warnings for the user beside the plan, the progress bar and failures.

They go to the standard library's logger `keras_dist`, which shows them on standard
output. To turn them off: `logging.getLogger("keras_dist").setLevel(logging.WARNING)`.
"""

import logging
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

_logger = logging.getLogger("keras_dist")

# Files that begin with one of these are not the user's code.
FOREIGN = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parent),
    "<frozen",
)


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
    level = next((n for n, e in levels if not e.filename.startswith(FOREIGN)), 2)
    warnings.warn(text, stacklevel=level)


def find_caller() -> str:
    """Return the line of the user's code that is running, for messages of ranks.

    The file has no folder, which may differ from host to host.
    """
    for entry in reversed(traceback.extract_stack()):
        if not entry.filename.startswith(FOREIGN):
            return f"{Path(entry.filename).name}, line {entry.lineno}"
    return "an unknown line"
