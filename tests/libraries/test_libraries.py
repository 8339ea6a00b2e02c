"""Pages on KerasHub, KerasRS and `keras.applications` run."""

import os

from harness.launching import ROOT, launch
from harness.needs import LIBRARIES, needs
from harness.pages import ALONE, blocks, named

pytestmark = needs("libraries", *LIBRARIES)


def test_the_script_of_each_page_runs_on_two_ranks(tmp_path):
    """As it stands, with small models in place of presets, which are downloaded."""
    pages = sorted(ALONE.glob("*.md"))
    assert pages and all(blocks(page, "py") for page in pages)
    names = ["tests/libraries/presets.py", *map(named, pages)]
    paths = [str(ROOT / "tests"), os.environ["PYTHONPATH"]]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    words = ["tests/harness/pages.py", tmp_path, *names]
    done = launch(words, ranks=2, timeout=600, env=env, check=True)
    assert all(f"== {name}" in done.stdout for name in names)
