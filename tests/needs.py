"""Leave out tests that need more than `make setup` installs."""

import importlib.util
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest


def leave_out(
    items: Iterable[Any],
    conftest: str,
    modules: Mapping[str, Collection[str]],
    target: str = "",
) -> None:
    """Mark the tests beside a conftest that cannot run here, with the reason.

    Args:
        items: The tests that pytest has found.
        conftest: The `__file__` of the conftest.
        modules: What each file needs to import.
        target: The target of `make` that installs what is missing; by default the name
            of the folder.
    """
    folder = Path(conftest).parent
    for item in items:
        if folder != item.path.parent:
            continue
        name = item.path.stem
        missing = [m for m in modules[name] if importlib.util.find_spec(m) is None]
        if missing:
            reason = (
                f"left out: {', '.join(missing)} missing (make {target or folder.name})"
            )
            item.add_marker(pytest.mark.skip(reason=reason))
