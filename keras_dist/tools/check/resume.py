"""The fifth stage: save, kill, resume, to the bit, in a folder of the user.

The launcher starts the ranks of this stage again when one of them was killed. The first
start tries the folder and kills a rank; the second one resumes, and compares with a
training that nothing has interrupted.
"""

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_dist import comm
from keras_dist.fit import dist_fit
from keras_dist.launch.ranks import RESTART
from keras_dist.tools.check.checks import (
    Found,
    Reporting,
    failed,
    ok,
    own_host,
    size_in_words,
    untried,
    warning,
)
from keras_dist.tools.check.truth import (
    BATCH,
    digest_of,
    state_of,
    vectors,
    with_dropout,
)

_NAME = "keras_dist_check"

# Bytes that are written, seconds until another host has to see them.
_BYTES, _SECONDS, _PAUSE = 8 * 2**20, 10.0, 0.2

# Batches of an epoch, epochs, steps from one save to the next, and the batch after
# which a rank is killed.
_BATCHES, _EPOCHS, _SAVE_STEPS, _KILLED = 4, 3, 2, 7
_SEED = 5

_CURE = (
    "Name a folder with `--resume-folder` that this user can write on all hosts, with "
    "free space, on a file system that can replace a file by renaming."
)


def run(options: argparse.Namespace) -> None:
    """Try the checks of this stage; all ranks call it."""
    comm.init()
    report = Reporting("resume", options.checks)
    parent = Path(options.folder or tempfile.gettempdir())
    # Two checks at once on one host do not share it; a restart of one does.
    folder = parent / f"{_NAME}.{os.getuid()}.{comm.broadcast(options.run_name)}"
    if RESTART in os.environ:
        report.check("resume", resumed, folder)
        _remove(folder)
        return
    _remove(folder)
    errors = [error for error in comm.gather(_written(folder)) if error]
    report.check("folder", written, folder, errors)
    if errors:
        cause = untried("the folder cannot be written")
        report.check("shared", lambda: cause)
        report.check("resume", lambda: cause)
        _remove(folder)
        return
    report.check("shared", shared, folder, bool(options.folder))
    if "resume" in options.checks:
        trained(folder / "killed", is_killed=True)
    _remove(folder)


def _written(folder: Path) -> str:
    """Write, rename and read a file; return the error, if any."""
    if comm.local_rank():
        return ""
    data = os.urandom(_BYTES)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return f"{own_host()}: {folder} belongs to another user"
        draft, path = folder / f"draft.{comm.rank()}", folder / f"host.{comm.rank()}"
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        is_equal = path.read_bytes() == data
        return "" if is_equal else f"{own_host()}: what is read is not what was written"
    except OSError as error:
        return f"{own_host()}: {error.strerror}: {error.filename or folder}"


def written(folder: Path, errors: Sequence[str]) -> Found:
    """Check that each host can write, rename and read in the folder."""
    if errors:
        return failed("; ".join(errors), _CURE)
    free = min(comm.gather(shutil.disk_usage(folder).free))
    return ok(
        f"{folder.parent}: written, renamed and read, {size_in_words(free)} free",
        free=free,
    )


def shared(folder: Path, is_named: bool) -> Found:
    """Check that all hosts see the files of the others."""
    is_writer = comm.local_rank() == 0
    names = [f"host.{r}" for r, w in enumerate(comm.gather(is_writer)) if w]
    seen = names
    end = time.monotonic() + _SECONDS
    while is_writer:
        seen = [name for name in names if (folder / name).exists()]
        # A folder that is not shared shows its own file alone.
        if len(seen) in (1, len(names)) or time.monotonic() > end:
            break
        time.sleep(_PAUSE)
    counts = {n for n, w in comm.gather((len(seen), is_writer)) if w}
    if len(names) == 1:
        return ok("one host")
    if counts == {len(names)}:
        return ok(f"all {len(names)} hosts see the files of the others")
    if counts == {1}:
        text = "not shared: each host keeps checkpoints of its own, which works, too"
        cure = "If it should be shared: look at the mounts of the hosts."
        return warning(text, cure) if is_named else ok(text)
    return failed(
        f"some hosts see {max(counts)} of {len(names)} files, others {min(counts)}, "
        f"after {_SECONDS:g} s",
        "Mount the same file system on all hosts, or on none.",
    )


def trained(folder: Path, *, is_killed: bool = False) -> tuple[str, int]:
    """Train in a folder; return a digest of the model, and the number of batches."""
    keras.utils.set_random_seed(_SEED)
    model = with_dropout(0.01)
    x, y = vectors(_BATCHES * BATCH * comm.size())
    batches: list[int] = []  # not in the callback, whose attributes are resumed, too

    def count(batch: int, logs: Any) -> None:
        batches.append(batch)
        is_last = comm.rank() == comm.size() - 1
        if is_killed and is_last and len(batches) == _KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    dist_fit(
        model,
        x,
        y,
        batch_size=BATCH,
        epochs=_EPOCHS,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=count)],
        resume=folder,
        save_steps=_SAVE_STEPS,
    )
    return digest_of(state_of(model)), len(batches)


def resumed(folder: Path) -> Found:
    """Check that the model after a kill equals that of an uninterrupted training."""
    found, count = trained(folder / "killed")
    expected, total = trained(folder / "whole")
    is_equal = all(comm.gather(found == expected))
    if count >= total:
        return failed(
            f"no checkpoint was found after the kill: all {total} steps ran again",
            "The disk has lost what was written before the kill: see `folder`. On "
            "several hosts each needs its own folder, or all one.",
        )
    if not is_equal:
        return failed(
            f"resumed for {count} of {total} steps, but with other bits than without "
            "a kill",
            "On a GPU, operations in another order each time are the likely cause: "
            "tf.config.experimental.enable_op_determinism().",
        )
    return ok(
        f"killed after step {_KILLED}, resumed for the last {count} of {total} steps: "
        "equal to the bit"
    )


def _remove(folder: Path) -> None:
    """Remove the files of this check on all hosts."""
    comm.gather("before")
    if comm.local_rank() == 0:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    comm.gather("after")
