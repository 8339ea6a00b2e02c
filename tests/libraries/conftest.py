"""KerasHub, KerasRS and others; left out, with a line, where one is not installed.

`make libraries` installs them into an environment of its own, and runs these tests.
"""

from needs import leave_out

_LIBRARIES = ("keras_hub", "keras_rs", "keras_tuner")


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, dict.fromkeys(("test_models", "test_pages"), _LIBRARIES))
