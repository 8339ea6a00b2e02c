"""Write a file atomically."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import BinaryIO


def write_whole(
    path: str | os.PathLike[str],
    content: str | bytes,
    *,
    is_durable: bool = True,
    mode: int = 0o666,
) -> None:
    """Write a file atomically: a reader sees the file of before or the new one.

    Args:
        path: Path of a local file, in a folder that exists.
        content: The content; text is written in UTF-8.
        is_durable: Whether to wait until it is on the disk, and not in memory alone.
        mode: Permissions of the file, of which the umask takes some away.

    Raises:
        OSError: If there is no room, or no such folder; the file is the one before.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[-200:]}.{secrets.token_hex(4)}.draft")
    try:
        new = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
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
