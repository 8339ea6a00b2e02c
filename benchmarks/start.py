"""Start a command, and read what its processes have measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = "measured: "


def keras_dist_run(ranks: int) -> list[str]:
    """The command of our launcher."""
    return [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]


def read_measured(output: str) -> list[dict]:
    """What stands behind the mark, of each line that has it."""
    lines = (line.partition(MARK)[2] for line in output.splitlines())
    return [json.loads(line) for line in lines if line]


def measure(*command: str, **variables: str) -> dict:
    """Run a command; return what one process has measured."""
    own = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        command,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=900,
    )
    for measured in read_measured(done.stdout):
        return measured
    raise RuntimeError(done.stdout + done.stderr)
