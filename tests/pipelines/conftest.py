"""Grain, Hugging Face datasets, torchdata; left out, with a line, where one is missing.

`make pipelines` installs them into an environment of its own, and runs these tests.
"""

from needs import leave_out

# What each file needs.
_NEEDS = {"test_pipelines": ("grain", "datasets", "torchdata")}


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, _NEEDS)
