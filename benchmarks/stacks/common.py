"""Common to all stacks: data, sizes, and the line that each rank prints."""

import argparse
import json
import resource
import sys
import time

import numpy as np

BATCH_SIZE = 128  # of one rank
EPOCHS = 3  # of which the first one is not measured
MARK = "measured: "

# Steps of an epoch of each model; and the models of flat images.
STEPS = {"cnn": 24, "mlp": 12, "wide_resnet": 8, "dropout": 24}
FLAT = ("mlp",)


def arguments(*methods: str) -> argparse.Namespace:
    """Arguments of the command line: the method to average, and the models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=methods)
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--scale", type=float, default=1, help="of the steps")
    parser.add_argument("--batch-norm", choices=("global", "rank"))
    return parser.parse_args()


def rows_of(name: str, ranks: int, scale: float = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels, for an epoch on so many ranks."""
    total = max(1, round(STEPS[name] * scale)) * BATCH_SIZE * ranks
    generator = np.random.default_rng(0)  # what they show does not change the time
    x = generator.random((total, 28, 28, 1), np.float32)
    y = generator.integers(0, 9, total)
    return (x.reshape((-1, 784)) if name in FLAT else x), y


def mark(measured: dict) -> str:
    """The line of what was measured, for the comparison."""
    return f"{MARK}{json.dumps(measured)}\n"


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
        self.epochs: list[list[float]] = []
        self.page_faults, self.system_seconds = 0, 0.0

    def begin(self) -> None:
        """An epoch begins."""
        self.epochs.append([])

    def step(self) -> None:
        """A step is over."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        if len(self.epochs) > 1 and self.epochs[-1]:  # as `seconds` in `report`
            self.page_faults += now.ru_minflt - self._before.ru_minflt
            self.system_seconds += now.ru_stime - self._before.ru_stime
        self._before = now
        self.epochs[-1].append(time.perf_counter())
        self.first_step = self.first_step or time.perf_counter() - self.begun

    def report(self) -> None:
        """Print the one line that the comparison reads."""
        measured = self.epochs[1:]
        steps = sum(len(ends) - 1 for ends in measured)
        line = {
            "part": self.part,
            "model": self.name,
            "rows": self.rows * steps,
            "seconds": sum(ends[-1] - ends[0] for ends in measured),
            "page_faults": self.page_faults,
            "system_seconds": self.system_seconds,
            "first_step": self.first_step,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        # In one piece: ranks write to the same pipe.
        sys.stdout.write(mark(line))
        sys.stdout.flush()
