"""Scripts for Horovod's Keras layer do on Keras 3 what they did on Keras 2.

What they did there is in `horovod_scripts/recorded.json`: weights and logs of two ranks
by Horovod 0.28.1 itself. The scripts are as `docs/how_to/migrate.md` says: they
import `keras_dist.horovod`, and spell what Keras 3 has renamed as it does.
"""

import json

import keras
import numpy as np
import pytest
from harness.launching import ROOT, write_script
from harness.pages import run_all

FOLDER = ROOT / "tests" / "horovod_scripts"
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "results")
# Run by Horovod's own layer on Keras 3, too.
UNCHANGED = "no_callbacks"


@pytest.fixture(scope="module")
def by_keras_dist(tmp_path_factory):
    """What each script has recorded, by its name: a list of both ranks.

    `unchanged` is one of them, but imports Horovod's own layer.
    """
    folder = tmp_path_factory.mktemp("horovod_scripts")
    ours, theirs = "import keras_dist.horovod as", "import horovod.tensorflow.keras as"
    text = (FOLDER / f"{UNCHANGED}.py").read_text()
    assert ours in text
    unchanged = write_script(folder, text.replace(ours, theirs), "unchanged.py")
    run_all([*(f"{FOLDER}/{name}.py" for name in NAMES), unchanged], folder, 2)
    return {
        name: [
            json.loads(next(folder.glob(f"*_{name}_py/{rank}.json")).read_text())
            for rank in range(2)
        ]
        for name in [*NAMES, "unchanged"]
    }


def assert_close(found, expected, name):
    """The same structure, and the same numbers but for rounding."""
    keras.tree.assert_same_structure(found, expected)
    others = keras.tree.flatten(found)
    for (path, value), other in zip(
        keras.tree.flatten_with_path(expected), others, strict=True
    ):
        # The rounding of a float16, or of some steps in float32.
        tolerance = 1e-3 if "half_precision" in (name, *path) else 1e-5
        if isinstance(value, (str, type(None))):
            assert other == value, path
        else:
            close = pytest.approx(value, rel=tolerance, abs=tolerance / 10)
            assert other == close, path


@pytest.mark.parametrize("name", NAMES)
def test_a_script_reaches_the_results_of_keras_2(name, by_keras_dist):
    """On each of two ranks under `keras-dist run`: weights, logs, rates and scores."""
    assert_close(by_keras_dist[name], RECORDED[name], name)


def test_horovod_itself_averages_nothing_on_keras_3(by_keras_dist):
    """The same script with Horovod's import: without an error the ranks differ."""
    first, second = by_keras_dist["unchanged"]
    assert np.abs(np.subtract(first["weights"][0], second["weights"][0])).max() > 0.01
    first, second = by_keras_dist[UNCHANGED]
    assert first == second


def test_there_is_a_recording_of_each_script():
    """And of no other; `fits` has many."""
    assert sorted(RECORDED) == NAMES
    assert len(NAMES) + len(RECORDED["fits"][0]) >= 20
