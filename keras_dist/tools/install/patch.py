"""Our changes to Horovod's source.

They stand in `patches/`, each with its reason, as files that `patch -p1` takes too.
They are applied here, since a host may have no such program: what a file removes, with
the lines around it, has to stand in the source exactly once.
"""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keras_dist.tools.install.failures import InstallError


@dataclass(frozen=True)
class Patch:
    """One change.

    Args:
        title: What it does, in words.
        file: The file that it changes, from the folder of `setup.py`.
        before: The lines that have to be there.
        after: Those that take their place.
    """

    title: str
    file: str
    before: str
    after: str


def patches() -> list[Patch]:
    """The changes, in the order of their files' names."""
    return [read(path.read_text()) for path in _files()]


def fingerprint(flags: str) -> str:
    """Eight digits for all that differs from a build of the unchanged source.

    Args:
        flags: Flags of the compiler that exclude some of the source.
    """
    digest = hashlib.sha256(flags.encode())
    for path in _files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def read(text: str) -> Patch:
    """The change that a patch file with one hunk describes.

    >>> read("Why.\\n--- a/x.cc\\n+++ b/x.cc\\n@@ -1,2 +1,2 @@\\n a\\n-b\\n+c\\n")
    Patch(title='Why.', file='x.cc', before='a\\nb\\n', after='a\\nc\\n')
    """
    reason, _, diff = text.partition("--- a/")
    file, _, hunk = diff.partition("\n@@ ")
    lines = hunk.splitlines()[1:]
    return Patch(
        title=reason.splitlines()[0],
        file=file.splitlines()[0],
        before=_joined(line[1:] for line in lines if line[:1] != "+"),
        after=_joined(line[1:] for line in lines if line[:1] != "-"),
    )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the source of Horovod into `folder`, and return its own folder there."""
    shutil.unpack_archive(archive, folder)
    return next(folder.glob("horovod-*"))


def apply(source: Path, change: Patch) -> None:
    """Change the source of Horovod.

    Args:
        source: The folder with its `setup.py`.
        change: The change.

    Raises:
        InstallError: If the lines to change are not there exactly once.
    """
    path = source / change.file
    text = path.read_text() if path.is_file() else ""
    count = text.count(change.before)
    if count != 1:
        raise InstallError(
            "The source of Horovod is not the one that keras_dist's patch was made "
            f"for. Received: {count} places to change in {path}, instead of 1. "
            "Check which index or mirror pip uses with `pip config list`."
        )
    path.write_text(text.replace(change.before, change.after))


def _files() -> list[Path]:
    return sorted((Path(__file__).parent / "patches").glob("*.patch"))


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
