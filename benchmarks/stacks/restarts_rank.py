"""A rank of `restarts.py`: the small CNN of `make chaos`, which can be made to fail.

    restarts_rank.py LOG PACE FOLDER RESUME

As `tests/hosts/cnn.py`, for as long as it is let; the rank on host H is killed after a
step once FOLDER/kill.H is there, and leaves the time in FOLDER/killed.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "hosts"))

import keras
from chaos_steps import BATCH, ROWS, SAVE_STEPS
from cnn import Paced, model_and_data

import keras_dist


class Killed(keras.callbacks.Callback):
    """Ends this process as the kernel would, without a word."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Where this is requested."""
        request = self.folder / f"kill.{socket.gethostname()}"
        if request.exists():
            request.unlink()
            (self.folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def main(log: str, pace: str, folder: str, resume: str) -> None:
    """Train until the launcher ends it."""
    model, x, y = model_and_data()
    world = keras_dist.init()
    keras_dist.dist_fit(
        model,
        x[:ROWS],
        y[:ROWS],
        batch_size=BATCH,
        epochs=100_000,
        shuffle=False,
        lr_scaling="none",
        verbose=0,
        callbacks=[Paced(log, pace, world), Killed(Path(folder))],
        resume=resume,
        save_steps=SAVE_STEPS,
    )


main(*sys.argv[1:])
