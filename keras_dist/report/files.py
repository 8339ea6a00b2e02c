"""Write a file whole or not at all."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by one with `text`: a reader sees the old or the new.

    Args:
        path: Path of a local file, in a folder that exists.
        text: The content.

    Raises:
        OSError: If there is no room, or no such folder; the file is the one before.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[-200:]}.{secrets.token_hex(4)}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def json_text(content: Any) -> str:
    """The content as JSON. A number that is not finite, which JSON has not, is text."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
