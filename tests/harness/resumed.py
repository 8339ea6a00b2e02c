"""One launch of a training that is ended again and again, for `test_resumed_fits.py`.

Usage: python resumed.py '{"folder": …, "launch": …, "end": [kind, updates], …}'
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import keras_dist
from harness.resumable import train, values_of

signaled = []


def end(kind):
    """Sends this process SIGKILL, or once a SIGTERM, as a cluster does."""
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if keras_dist.rank() == keras_dist.size() - 1 and not signaled:
        signaled.append(kind)
        os.kill(os.getpid(), signal.SIGTERM)


def main(given):
    """Trains, and writes which rows were seen and how it ended."""
    folder = Path(given["folder"])
    kind, updates = given["end"] or (None, None)
    part = f"{given['launch']}.{keras_dist.rank()}"
    options = {"is_equivalent": given["is_equivalent"], **given["options"]}

    def trained(name, **more):
        with open(folder / f"{name}.rows.{part}", "w") as file:
            begin = time.monotonic()

            def saw(update, rows):
                print(json.dumps([update, rows]), file=file, flush=True)
                if update not in since:
                    since[update] = time.monotonic() - begin

            since = {}
            state, history = train(str(folder / name), saw=saw, **options, **more)
        if keras_dist.rank() == 0:
            np.savez(folder / f"{name}.npz", *state)
            (folder / f"{name}.json").write_text(json.dumps(values_of(history)))
            if since:
                print(f"{name}: {min(since.values()):.1f} s to the first step")

    if given["launch"] == 0:
        trained("whole")
    try:
        trained("cut", seed=100 + given["launch"], dies=updates, die=lambda: end(kind))
    except SystemExit as error:
        print("exits with", error.code, flush=True)
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
