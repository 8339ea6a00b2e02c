"""Common to the trainings of the curve: images, sizes, and the line of each rank."""

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np

# The folder of Debian's package dataset-fashion-mnist.
FASHION = Path("/usr/share/datasets/fashion-mnist")
BATCH_SIZE = 96  # of all ranks: 1, 2, 3, 4 and 8 divide it
LEARNING_RATE = 0.01
EPOCHS = 5
ROWS, VALIDATION_ROWS = 1920, 1000  # of Fashion-MNIST
MARK = "measured: "


def arguments(*methods: str) -> argparse.Namespace:
    """Arguments of the command line: the method, the data and the seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=methods)
    parser.add_argument("--data", choices=("fashion", "digits", "example"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--float64", action="store_true", help="of Keras")
    return parser.parse_args()


def best_data() -> str:
    """Fashion-MNIST where Debian's package is installed, else scikit-learn's digits."""
    return "fashion" if FASHION.is_dir() else "digits"


def load(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of 28 × 28 pixels from 0 to 1 and labels, to train and to validate."""
    if name == "digits":
        from sklearn.datasets import load_digits  # noqa: PLC0415 - not all need it
        from sklearn.model_selection import train_test_split  # noqa: PLC0415

        images, labels = load_digits(return_X_y=True)
        x = images.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2) / 16
        x = np.pad(x, ((0, 0), (2, 2), (2, 2)))[..., None].astype("float32")
        x, x_val, y, y_val = train_test_split(x, labels, random_state=0)
        return x, y.astype("int64"), x_val, y_val.astype("int64")
    parts = []
    for part, rows in (("train", ROWS), ("t10k", VALIDATION_ROWS)):
        images = gzip.decompress(
            (FASHION / f"{part}-images-idx3-ubyte.gz").read_bytes()
        )
        labels = gzip.decompress(
            (FASHION / f"{part}-labels-idx1-ubyte.gz").read_bytes()
        )
        x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1)[:rows]
        y = np.frombuffer(labels, np.uint8, offset=8)[:rows]
        parts += [x.astype("float32") / 255, y.astype("int64")]
    return tuple(parts)


def report(seed: int, losses: list[float], accuracies: list[float]) -> None:
    """Print the one line that the driver reads: the validation after each epoch."""
    line = {
        "part": "own",
        "model": str(seed),
        "loss": losses,
        "accuracy": accuracies,
    }
    # In one piece: ranks write to the same pipe.
    sys.stdout.write(MARK + json.dumps(line) + "\n")
    sys.stdout.flush()
