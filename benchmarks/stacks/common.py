"""Common to all stacks: data, sizes, and the line that each rank prints."""

import argparse
import gzip
import itertools
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BATCH_SIZE = 128  # of one rank
EPOCHS = 3  # of which the first one is not measured
MARK = "measured: "

FOLDER = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Case:
    """A model of the comparison: steps of an epoch, and whether images are flat."""

    steps: int
    is_flat: bool = False


CASES = {
    "cnn": Case(steps=24),
    "mlp": Case(steps=12, is_flat=True),
    "wide_resnet": Case(steps=8),
}


def arguments(*methods: str) -> argparse.Namespace:
    """Arguments of the command line: the method to average, and the models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=methods)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--scale", type=float, default=1, help="of the steps")
    parser.add_argument("--optimizer", default="momentum", help="sgd, momentum, adam")
    return parser.parse_args()


def rows_of(name: str, ranks: int, scale: float = 1) -> tuple[np.ndarray, np.ndarray]:
    """Images with values 0 to 1, and labels, for an epoch on so many ranks."""
    case = CASES[name]
    # Whole executions of four steps, too.
    total = 4 * max(1, round(case.steps * scale / 4)) * BATCH_SIZE * ranks
    if FOLDER.exists():
        x, y = images()
    else:  # what the images show does not matter to the time
        generator = np.random.default_rng(0)
        x = generator.random((60_000, 28, 28, 1), np.float32)
        y = generator.integers(0, 9, 60_000)
    x, y = x[:total], y[:total]
    return (x.reshape((-1, 784)) if case.is_flat else x), y


def images(part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """All images of Fashion-MNIST, values 0 to 1, and labels; or those of "t10k"."""
    packed = (FOLDER / f"{part}-images-idx3-ubyte.gz").read_bytes()
    pixels = np.frombuffer(gzip.decompress(packed)[16:], np.uint8)
    packed = (FOLDER / f"{part}-labels-idx1-ubyte.gz").read_bytes()
    labels = np.frombuffer(gzip.decompress(packed)[8:], np.uint8)
    return pixels.reshape((-1, 28, 28, 1)) / np.float32(255), labels.astype(np.int64)


class Clock:
    """Times the steps of one model on one rank, from the end of an epoch's first one.

    Args:
        part: "own" for the model that is measured, "twin" for its ceiling beside it.
        name: Of the model.
        rows: Of one step on all ranks.
    """

    def __init__(self, part: str, name: str, rows: int) -> None:
        self.part, self.name, self.rows = part, name, rows
        self.begun = time.perf_counter()
        self.first_step = 0.0
        self.state = 0
        self.epochs: list[list[float]] = []

    def begin(self) -> None:
        """An epoch begins."""
        self.epochs.append([])

    def step(self) -> None:
        """A step is over."""
        self.epochs[-1].append(time.perf_counter())
        self.first_step = self.first_step or time.perf_counter() - self.begun

    def report(self, **more: object) -> None:
        """Print the one line that the comparison reads."""
        measured = self.epochs[1:]
        steps = sum(len(ends) - 1 for ends in measured)
        line = {
            "part": self.part,
            "model": self.name,
            "rows": self.rows * steps,
            "seconds": sum(ends[-1] - ends[0] for ends in measured),
            "steps": [
                round(end - begin, 6)
                for ends in measured
                for begin, end in itertools.pairwise(ends)
            ],
            "first_step": self.first_step,
            **more,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        # In one piece: ranks write to the same pipe.
        sys.stdout.write(MARK + json.dumps(line) + "\n")
        sys.stdout.flush()
