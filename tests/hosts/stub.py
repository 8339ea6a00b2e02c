"""A rank without TensorFlow: says that it is there, and ends as its case says.

stub.py FOLDER CASE [RANK]     the case is that of this rank, or of all
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path


class SavedExit(SystemExit):
    """As `checkpoint/saver.py` ends a rank that has saved."""


def save(number=None, frame=None):
    """Take 5 s to save, longer than a rank that is not saving gets."""
    time.sleep(5)
    (folder / f"saved.{rank}").touch()
    raise SavedExit(75)


folder, case, *chosen = Path(sys.argv[1]), *sys.argv[2:]
rank, start = os.environ["HOROVOD_RANK"], os.environ.get("KERAS_DIST_RESTART", "0")
folder.mkdir(exist_ok=True)
(folder / f"there.{start}.{rank}").write_text(os.environ["HOME"])
if chosen in ([], [rank]):
    if case == "exit":
        atexit.register(time.sleep, 30)  # the report is there, and the rank still runs
        sys.exit(70)
    if case == "saved":
        raise SavedExit(75)
    if case == "save":
        signal.signal(signal.SIGTERM, save)
    if case == "again" and start != "0":
        sys.exit(0)
time.sleep(600)
