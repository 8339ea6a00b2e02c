"""What the scripts are given, and what they give: rows, first weights, results."""

import json
import os
from pathlib import Path

import numpy as np


def rows(number=32, width=4, classes=None, seed=0):
    """Rows and targets, the same on all ranks and in all versions of NumPy."""
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (number, width)).astype("float32")
    if classes:
        return x, random.randint(0, classes, number)
    return x, (x @ random.uniform(-1, 1, (width, 1))).astype("float32")


def start(model, seed=1):
    """Give a model weights that do not depend on the version of Keras."""
    random = np.random.RandomState(seed)
    shapes = [weight.shape for weight in model.get_weights()]
    model.set_weights([random.uniform(0.1, 0.5, shape) for shape in shapes])


def record(**values):
    """Add what this rank has computed to its file in the script's folder."""
    path = Path(f"{os.environ['HOROVOD_RANK']}.json")
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | plain(values)))


def plain(value):
    """Numbers, strings and lists of them, for a file."""
    if isinstance(value, dict):
        return {str(key): plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (str, bool, type(None))):
        return value
    return np.asarray(value).tolist()
