"""What the page about libraries shows runs."""

import os
import sys

from launch import ROOT, launch


def test_snippets_run_on_two_ranks(tmp_path):
    """In their order, with small models in place of presets, which are downloaded."""
    pages = ["tests/libraries/presets.py", "docs/how_to/libraries.md"]
    command = [sys.executable, "tests/pages.py", str(tmp_path), *pages]
    paths = [str(ROOT / "tests" / "ranks"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    done = launch(command, ranks=2, timeout=600, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
