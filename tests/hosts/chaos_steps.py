"""What `chaos.py` and its training `cnn.py` both know, without TensorFlow."""

from pathlib import Path

BATCH, ROWS, TEST_ROWS, RANKS, SAVE_STEPS = 25, 240, 400, 3, 3


def steps_in(log):
    """For each line of a log: the start, the step, and the number of ranks."""
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    return [tuple(map(int, line.split())) for line in lines]
