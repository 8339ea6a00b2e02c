"""Leave out tests that need more than `make setup` installs."""

import importlib.util
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest


def leave_out(
    items: Iterable[Any],
    conftest: str,
    modules: Mapping[str, Collection[str]],
    programs: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Mark the tests beside a conftest that cannot run here, with the reason.

    Args:
        items: The tests that pytest has found.
        conftest: The `__file__` of the conftest, whose folder is the name of the target
            of `make` that installs what is missing.
        modules: What each file needs to import.
        programs: What some files need to start.
    """
    folder = Path(conftest).parent
    for item in items:
        if folder != item.path.parent:
            continue
        name = item.path.stem
        missing = [m for m in modules[name] if importlib.util.find_spec(m) is None]
        missing += [p for p in (programs or {}).get(name, ()) if not shutil.which(p)]
        if missing:
            reason = f"left out: {', '.join(missing)} missing (make {folder.name})"
            item.add_marker(pytest.mark.skip(reason=reason))
