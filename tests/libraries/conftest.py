"""KerasHub, KerasRS and others; left out, with a line, where one is not installed.

`make libraries` installs them into an environment of its own, and runs these tests.
"""

from needs import leave_out

_LIBRARIES = ("keras_hub", "keras_rs", "keras_tuner")
_PACKAGES = (
    *("adapt", "bayesflow", "hgq", "imblearn"),
    *("kgcnn", "scikeras", "tsgm", "tslearn", "umap"),
)


def pytest_collection_modifyitems(items):
    """Leave out what cannot be run here, with the reason in the summary."""
    needs = dict.fromkeys(("test_models", "test_pages"), _LIBRARIES)
    leave_out(items, __file__, {**needs, "test_packages": _PACKAGES})
