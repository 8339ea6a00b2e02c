"""Schemas of Kubernetes; left out, with a line, where their validator is not there.

`make clusters` installs it into an environment of its own, and runs these tests.
"""

from needs import leave_out


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    leave_out(items, __file__, {"test_schemas": ("kubernetes_validate",)})
