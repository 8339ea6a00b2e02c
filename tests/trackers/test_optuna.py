"""All ranks train each trial of Optuna; the trials are those of one process."""

import json
import sys

import pytest
from launch import launch

_SCRIPT = "tests/trackers/search_optuna.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What two ranks wrote, and plain Keras on one process."""
    folders = []
    for ranks, more in ((2, []), (None, ["plain"])):
        folder = tmp_path_factory.mktemp("optuna")
        command = [sys.executable, _SCRIPT, str(folder), *more]
        done = launch(command, ranks=ranks, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        folders.append(folder)
    return folders


@pytest.mark.parametrize("objective", ["by_callback", "by_epochs", "by_own_callback"])
def test_trials_are_those_of_one_process(folders, objective):
    """States, parameters and values; some are pruned, some have failed on one rank."""
    ours, plain = (json.loads((f / f"{objective}.json").read_text()) for f in folders)
    for trial, expected in zip(ours, plain, strict=True):
        assert trial[:3] == expected[:3]
        assert trial[3] == pytest.approx(expected[3], abs=1e-5)
        assert trial[4] == pytest.approx(expected[4], abs=1e-5)
    assert {trial[0] for trial in plain} == {"COMPLETE", "PRUNED", "FAIL"}
