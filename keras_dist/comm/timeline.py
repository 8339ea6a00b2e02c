"""Record what each collective waits for, in Horovod's timeline."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from keras_dist.comm import runtime, transport
from keras_dist.comm.agreement import run_on_all


def announce_timeline(path: str | os.PathLike[str] | None) -> None:
    """Say that `timeline` is going to be called; Horovod may not have started yet."""
    if path is not None and not runtime.is_started():
        transport.allow_timeline()


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside the block, the first rank writes a timeline of all collectives.

    A file of JSON for https://ui.perfetto.dev or `chrome://tracing`: of each collective
    when each rank was ready, and how long it was waited for, copied and sent.

    Horovod's thread that writes it keeps a core of the first rank busy, to the end of
    the process: what is recorded is slower than without.

    Args:
        path: The file, replaced if it is there; `None`: nothing is recorded. One rank
            has no collectives, and writes nothing.

    Raises:
        ValueError: On all ranks, if Horovod had started before it was announced,
            `HOROVOD_TIMELINE` is a file already, or inside of a process set.
        OSError: If the file cannot be written; on the other ranks a `RuntimeError`.
    """
    link, world = runtime.connection()
    if path is not None and runtime.is_within():
        raise ValueError(
            "A timeline is one of all ranks. Received: `timeline` with a process set."
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
