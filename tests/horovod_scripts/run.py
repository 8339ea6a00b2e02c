"""Run scripts one after the other on this rank, and write what each has recorded.

    python run.py FOLDER_OF_RESULTS SCRIPT.py ...

All in one process, since to import TensorFlow takes seconds. Each script has a folder
of its own, which the ranks share: FOLDER_OF_RESULTS/NAME/.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import results
import tensorflow as tf


def run(script, folder):
    """Run one script, and write its results for this rank."""
    here = folder / script.stem
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    results.found.clear()
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)
    runpy.run_path(str(script), run_name="__main__")
    path = folder / f"{script.stem}.{os.environ['HOROVOD_RANK']}.json"
    path.write_text(json.dumps(results.found))


def main(folder, *scripts):
    """Run all of them; the first error ends the rank."""
    folder = Path(folder).resolve()  # before the first script has one of its own
    paths = [Path(script).resolve() for script in scripts]
    for path in paths:
        try:
            run(path, folder)
        except BaseException:
            print(f"In {path.name}:\n{traceback.format_exc()}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
