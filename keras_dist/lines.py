"""Lines for the user beside the plan, the progress bar and failures.

They go to the standard library's logger `keras_dist`, which shows them on standard
output. To turn them off: `logging.getLogger("keras_dist").setLevel(logging.WARNING)`.
"""

import logging
import sys

_logger = logging.getLogger("keras_dist")


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
