"""Experiment trackers and tuners; left out, with a line, where one is not installed.

`make trackers` installs them into an environment of its own, and runs these tests.
"""

import importlib.util
from pathlib import Path

import pytest

# What each file needs.
_NEEDS = {
    "test_mlflow": ("mlflow",),
    "test_wandb": ("wandb",),
    "test_keras_tuner": ("keras_tuner",),
    "test_optuna": ("optuna", "optuna_integration"),
}


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    for item in items:
        if Path(__file__).parent == item.path.parent:
            needs = _NEEDS[item.path.stem]
            missing = [name for name in needs if importlib.util.find_spec(name) is None]
            if missing:
                reason = f"left out: {', '.join(missing)} missing (make trackers)"
                item.add_marker(pytest.mark.skip(reason=reason))
