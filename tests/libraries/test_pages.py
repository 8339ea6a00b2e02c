"""What the pages about libraries show runs."""

import os
import sys

from launch import ROOT, launch
from needs import LIBRARIES, needs
from pages import ALONE, blocks, named

pytestmark = needs("libraries", *LIBRARIES)


def test_the_script_of_each_page_runs_on_two_ranks(tmp_path):
    """As it stands, with small models in place of presets, which are downloaded."""
    pages = sorted(ALONE.glob("*.md"))
    assert pages and all(blocks(page, "py") for page in pages)
    names = ["tests/libraries/presets.py", *map(named, pages)]
    command = [sys.executable, "tests/pages.py", str(tmp_path), *names]
    paths = [str(ROOT / "tests" / "ranks"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    done = launch(command, ranks=2, timeout=600, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert all(f"== {name}" in done.stdout for name in names)
