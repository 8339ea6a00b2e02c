"""Run scripts one after the other on this rank, and write what each has recorded.

    python run.py FOLDER_OF_RESULTS SCRIPT.py ...

All in one process, since to import TensorFlow takes seconds. Each script has a folder
of its own, which the ranks share: FOLDER_OF_RESULTS/NAME/.
"""

import functools
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if os.environ.get("TF_USE_LEGACY_KERAS"):
    # What `import keras` was when these scripts were written.
    import tf_keras

    sys.modules["keras"] = tf_keras

    def with_lr(optimizer):
        """Let `lr=` be the rate again, which from Keras 2.11 on is ignored."""
        begin = optimizer.__init__

        @functools.wraps(begin)
        def init(self, *args, lr=None, **kwargs):
            if lr is not None:
                kwargs["learning_rate"] = lr
            begin(self, *args, **kwargs)

        optimizer.__init__ = init

    for name in ("SGD", "Adam", "Adadelta", "RMSprop"):
        with_lr(getattr(tf_keras.optimizers, name))

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
