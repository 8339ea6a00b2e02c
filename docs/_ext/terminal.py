"""Pictures of a terminal of 80 columns, recorded each time the site is built.

A page shows docs/_terminal/NAME.svg.
"""

import fcntl
import io
import os
import pty
import shutil
import struct
import sys
import sysconfig
import tempfile
import termios
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
FOLDER = DOCS / "_terminal"
COLUMNS = 80

_TRAIN = """\
import time
import keras
import numpy as np
import keras_dist

x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Mine(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        {callback}


keras_dist.dist_fit(model, x, y, epochs=3, {arguments}callbacks=[Mine()], verbose=2)
"""


def _script(callback: str = "pass", arguments: str = "") -> str:
    return _TRAIN.format(callback=callback, arguments=arguments)


@dataclass(frozen=True)
class Scene:
    """A command, as it is typed, and what it prints.

    Args:
        command: For bash.
        script: The text of the file train.py.
        interrupt: Ctrl-C is typed when this has been printed.
    """

    command: str
    script: str
    interrupt: str | None = None


SCENES = {
    "demo": Scene(
        "keras-dist run -np 2 digits.py",
        (DOCS.parent / "examples" / "digits.py").read_text(),
    ),
    "failing_rank": Scene(
        "keras-dist run -np 2 train.py",
        _script("if keras_dist.rank() == 1: [][epoch]"),
    ),
    "killed_rank": Scene(
        "bash failure.sh", (DOCS.parent / "examples" / "failure.sh").read_text()
    ),
    "stall": Scene(
        "keras-dist run -np 2 --stall-limit 8 train.py",
        _script("if keras_dist.rank() == 1: time.sleep(1000)"),
    ),
    "wrong_argument": Scene(
        "keras-dist run -np 2 train.py",
        _script(arguments='lr_scaling="cubic", '),
    ),
    "interrupted": Scene(
        "keras-dist run -np 2 train.py",
        _script("time.sleep(0.5 if epoch else 0)", 'resume="checkpoints", '),
        interrupt="Epoch 2/3",
    ),
}


def play(scene: Scene, folder: Path) -> str:
    """Return what a terminal gets, with its colors.

    Args:
        scene: What is typed.
        folder: Where; its name is of no matter.
    """
    (folder / scene.command.split()[-1]).write_text(scene.script)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        os.execvp("bash", ["bash", "-c", scene.command])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    printed, interrupt = b"", scene.interrupt
    while True:
        try:
            printed += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if interrupt and interrupt.encode() in printed:
            os.write(terminal, b"\x03")
            interrupt = None
    os.waitpid(process, 0)
    os.close(terminal)
    return printed.decode(errors="replace").replace("\r\n", "\n")


def draw(command: str, printed: str, path: Path) -> None:
    """Write a picture of a terminal with a command and what it printed.

    Names of this machine's folders are left out.
    """
    packages = sysconfig.get_path("purelib")
    for folder in (packages, sysconfig.get_path("stdlib"), str(DOCS.parent)):
        printed = printed.replace(f"{folder}/", "")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}", "bold"), soft_wrap=False)
    console.print(Text.from_ansi(printed))
    console.save_svg(str(path), title="", unique_id=path.stem)


def _record(app: Any) -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory() as folder:
            printed = play(scene, Path(folder)).replace(f"{folder}/", "")
            draw(scene.command, printed, FOLDER / f"{name}.svg")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", _record)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
