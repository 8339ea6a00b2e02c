"""All ranks train each trial of KerasTuner; the trials are those of one process."""

import json
import sys
from pathlib import Path

import pytest
from launch import launch

_SCRIPT = "tests/trackers/search_keras_tuner.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What two ranks wrote, and plain Keras on one process."""
    folders = []
    for ranks, more in ((2, []), (None, ["plain"])):
        folder = tmp_path_factory.mktemp("tuner")
        command = [sys.executable, _SCRIPT, str(folder), *more]
        done = launch(command, ranks=ranks, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        folders.append(folder)
    return folders


@pytest.mark.parametrize("name", ["random", "global", "own_fit", "hyperband"])
def test_trials_are_those_of_one_process(folders, name):
    """Values, states and scores; some of them have failed on one rank."""
    ours, plain = (json.loads((f / f"{name}.json").read_text()) for f in folders)
    assert len(ours) == len(plain) and ours.pop() == plain.pop() == 1
    for (values, status, score), expected in zip(ours, plain, strict=True):
        assert [values, status] == expected[:2]
        assert score == pytest.approx(expected[2], abs=1e-5)
    assert {status for _, status, _ in plain} == {"COMPLETED", "FAILED"}


@pytest.mark.parametrize("name", ["random", "global", "own_fit", "hyperband"])
def test_the_first_rank_writes_the_folder(folders, name):
    """The same files; but the first rank has saved the epoch in which another fails."""
    ours, plain = (
        {str(path.relative_to(f)) for path in (f / name).rglob("*")} for f in folders
    )
    assert plain <= ours
    assert {Path(path).name for path in ours - plain} <= {"checkpoint.weights.h5"}
