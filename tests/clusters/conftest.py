"""Schemas, torchrun and Ray Train; left out, with a line, where one is not there.

`make clusters` installs them into an environment of its own, and runs these tests.
"""

from needs import leave_out

_NEEDS = {
    "test_schemas": ("kubernetes_validate",),
    "test_launchers": ("ray", "torch"),
}


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, _NEEDS)
