"""Record Horovod's timeline: when each rank was ready for each collective."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from keras_dist.comm import runtime, transport
from keras_dist.comm.agreement import run_on_all


def announce_timeline(path: str | os.PathLike[str] | None) -> None:
    """Let `timeline` be used later; call it before Horovod starts.

    Args:
        path: The file of the timeline; with `None` nothing is done.
    """
    if path is not None and not runtime.is_started():
        transport.allow_timeline()


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside the block, the first rank writes a timeline of all collectives.

    The file is JSON for https://ui.perfetto.dev or `chrome://tracing`. For each
    collective it shows when each rank was ready, and how long the collective waited,
    copied and sent.

    Horovod's thread that writes the file keeps a core of the first rank busy until the
    process ends, so a recorded training is slower.

    Args:
        path: The file, replaced if it exists; with `None` nothing is recorded. On one
            rank there are no collectives, and no file is written.

    Raises:
        ValueError: On all ranks, if Horovod started before `announce_timeline`, if
            `HOROVOD_TIMELINE` names a file already, or inside a process set.
        OSError: On the first rank, if the file cannot be written; a `RuntimeError` on
            the other ranks.
    """
    link, world = runtime.connection()
    if path is not None and runtime.is_within():
        raise ValueError(
            "A timeline is always of all ranks. Received: `timeline` with a process "
            "set. Pass only one of them."
        )
    if path is None or link is None:
        yield
        return
    file = Path(path).absolute()

    def check() -> None:
        transport.check_timeline()
        if world.rank == 0:
            file.write_text("")

    run_on_all(check)
    transport.start_timeline(link, str(file))
    try:
        yield
    finally:
        transport.stop_timeline(link)


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Start a timeline on all ranks, which `stop_timeline` ends; see `timeline`.

    Raises:
        ValueError: On all ranks, if Horovod was not started for it.
    """
    link, _ = runtime.connection()
    if link is not None:
        run_on_all(transport.check_timeline)
        transport.start_timeline(link, str(Path(path).absolute()))


def stop_timeline() -> None:
    """End the timeline that `start_timeline` has begun."""
    link, _ = runtime.connection()
    if link is not None:
        transport.stop_timeline(link)
