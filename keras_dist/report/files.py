"""Write a file atomically."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file at `path` atomically: a reader sees the old or the new.

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


def new_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a new file for writing, in the place of what is there.

    A link that somebody else has put there is removed, and never followed.

    Args:
        path: Path of a local file, in a folder that exists.

    Raises:
        OSError: If it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, "xb")


def json_text(content: Any) -> str:
    """Write content as JSON."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
