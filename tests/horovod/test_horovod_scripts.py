"""Scripts for Horovod's Keras layer do on Keras 3 what they did on Keras 2.

What they did there is in `horovod_scripts/recorded.json`: weights and logs of two ranks
by Horovod 0.28.1 itself. The scripts are as `docs/how_to/migrate.md` says: they
import `keras_dist.horovod`, and spell what Keras 3 has renamed as it does.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import launch

FOLDER = Path(__file__).parents[1] / "horovod_scripts"
RECORDED = json.loads((FOLDER / "recorded.json").read_text())
RUNNER = ("run.py", "results.py")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.name not in RUNNER)
# Run by Horovod's own layer on Keras 3, too.
UNCHANGED = "no_callbacks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts, and `unchanged.py`, which imports Horovod's own layer."""
    folder = tmp_path_factory.mktemp("horovod_scripts")
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, folder)
    ours, theirs = "import keras_dist.horovod as", "import horovod.tensorflow.keras as"
    text = (FOLDER / f"{UNCHANGED}.py").read_text()
    assert ours in text
    (folder / "unchanged.py").write_text(text.replace(ours, theirs))
    return folder


@pytest.fixture(scope="module")
def by_keras_dist(folder):
    """What each script has recorded, by its name: a list of both ranks."""
    scripts = [folder / f"{name}.py" for name in [*NAMES, "unchanged"]]
    results = folder / "results"
    done = launch(
        [sys.executable, str(folder / "run.py"), str(results), *map(str, scripts)],
        ranks=2,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-8000:]
    return {
        script.stem: [
            json.loads((results / f"{script.stem}.{rank}.json").read_text())
            for rank in range(2)
        ]
        for script in scripts
    }


def assert_close(found, expected, where):
    """The same structure, and the same numbers but for rounding."""
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}, {key}")
    elif isinstance(expected, (str, type(None))):
        assert found == expected, where
    elif isinstance(expected, list) and any(
        isinstance(one, (list, dict, str, type(None))) for one in expected
    ):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(found[index], value, f"{where}[{index}]")
    else:
        # The rounding of a float16, or of some steps in float32.
        tolerance = 1e-3 if "half_precision" in where else 1e-5
        np.testing.assert_allclose(
            found, expected, rtol=tolerance, atol=tolerance / 10, err_msg=where
        )


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
