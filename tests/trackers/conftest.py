"""Experiment trackers and tuners; left out, with a line, where one is not installed.

`make libraries` installs them into an environment of its own, and runs these tests.
"""

from needs import leave_out

# What each file needs.
_NEEDS = {
    "test_mlflow": ("mlflow",),
    "test_wandb": ("wandb",),
    "test_tune": ("optuna",),
}


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, _NEEDS, target="libraries")
