"""Leave out tests that need more than `make setup` installs."""

import importlib.util

import pytest

# Of the pages about libraries.
LIBRARIES = ("keras_hub", "keras_rs", "keras_tuner")


def needs(target: str, *modules: str) -> pytest.MarkDecorator:
    """Mark tests that cannot run without these, which a target of `make` installs."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    reason = f"left out: {', '.join(missing)} missing (make {target})"
    return pytest.mark.skipif(bool(missing), reason=reason)
