"""The command `keras-dist migrate`."""

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_dist.report import write_whole

_INSTALL = "pip install 'keras-dist[migrate]'"
_NOTEBOOK = ".ipynb"
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True, order=True)
class Finding:
    """A line that a person has to change, or should know about.

    Attributes:
        line: Number of the line, from 1.
        reason: What is wrong.
        advice: What to write instead.
        is_left: Whether the line needs a change that was not made.
    """

    line: int
    reason: str
    advice: str
    is_left: bool = True

    def text(self, path: str) -> str:
        """Return one line: file, line, reason and replacement.

        >>> Finding(3, "tf.placeholder is TensorFlow 1", "Use keras.Input").text("a.py")
        'a.py:3: not changed: tf.placeholder is TensorFlow 1. Use keras.Input.'
        """
        kind = "not changed" if self.is_left else "note"
        return f"{path}:{self.line}: {kind}: {self.reason}. {self.advice}."


@dataclass(frozen=True)
class Migrated:
    """A file after the rules.

    Attributes:
        source: The new text, with encoding and line ends of the old one.
        findings: Lines that were left, or that a person should know about.
    """

    source: bytes
    findings: tuple[Finding, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if nothing was left for a person."""
        return not any(finding.is_left for finding in self.findings)


def add_migrate(commands: Any) -> None:
    """Add the command `migrate` to those of `keras-dist`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "migrate",
        help="rewrite a script for Horovod and Keras 2 for Keras 3",
        description=(
            "Rewrite scripts for Horovod's Keras layer, and for Keras 2, so that they "
            "run on Keras 3 with keras_dist.horovod. Prints the difference; what has "
            "to be changed by hand is listed on standard error, and the exit code is 1."
        ),
    )
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help="a script, or a folder of them"
    )
    command.add_argument(
        "--write", action="store_true", help="change the files, too, not only print"
    )
    command.add_argument(
        "--to",
        choices=("horovod", "dist_fit"),
        default="horovod",
        metavar="TARGET",
        help="`horovod` (default): keep the script, on keras_dist.horovod; `dist_fit`: "
        "replace optimizer, callbacks and scaling by one call, where that is sure",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    migrate = _tool(options.to)
    done = [(path, *_migrated(path, migrate)) for path in _files(options.paths)]
    # As bytes: a difference has the encoding of its file, as that of git.
    sys.stdout.flush()
    for path, old, new in done:
        sys.stdout.buffer.write(difference(_shown(path), old, new))
    sys.stdout.flush()
    for path, _, new in done:
        for finding in new.findings:
            print(finding.text(str(path)), file=sys.stderr)
    if options.write:
        for path, old, new in done:
            if new.source != old:
                mode = path.stat().st_mode
                write_whole(path, new.source)
                path.chmod(mode)
    return 0 if all(new.is_whole for _, _, new in done) else 1


def _migrated(
    path: Path, migrate: Callable[[bytes], Migrated]
) -> tuple[bytes, Migrated]:
    """Return the text of a file, and the file migrated, or why it cannot be read."""
    try:
        old = path.read_bytes()
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        return b"", _refused(b"", reason, "Let this user read it")
    if path.suffix == _NOTEBOOK:
        reason = "this is a notebook, and only scripts are read"
        advice = "Save it as a script first: jupyter nbconvert --to script"
        return old, _refused(old, reason, advice)
    return old, migrate(old)


def _refused(text: bytes, reason: str, advice: str) -> Migrated:
    return Migrated(text, (Finding(1, reason, advice),))


def _tool(target: str) -> Any:
    # libcst is needed by this command alone.
    name = "source" if target == "horovod" else "fit"
    try:
        module = importlib.import_module(f"keras_dist.tools.migrate.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("libcst", "yaml"):
            raise
        raise RuntimeError(
            "keras-dist migrate reads scripts with libcst, which is not installed. "
            f"Install it: {_INSTALL}"
        ) from None
    return module.migrate


def difference(path: str, old: bytes, new: Migrated) -> bytes:
    """Return the unified diff of one file, empty where nothing changed.

    Args:
        path: Name of the file in the diff.
        old: Text before.
        new: The file after.
    """
    # Only a line feed ends a line, as in git; Python's `splitlines` knows other ends.
    before, after = (io.BytesIO(text).readlines() for text in (old, new.source))
    a, b = os.fsencode(f"a/{path}"), os.fsencode(f"b/{path}")
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, a, b)
    ended = (
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        for line in lines
    )
    return b"".join(ended)


def _shown(path: Path) -> str:
    """Return a name for the diff that `git apply` and `patch -p1` find from here."""
    here = Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    return str(path).lstrip("/")


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the scripts, and the scripts in folders, each once."""
    seen = set()
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"There is no such file or folder. Received: {name}")
        found = list(_inside(path)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"There is no script in this folder. Received: {name}")
        for file in found:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the scripts of a folder, and its notebooks with Horovod."""
    for file in sorted(folder.rglob("*")):
        inner = [one.name for one in file.relative_to(folder).parents]
        is_skipped = any(one.startswith(".") or one in _SKIPPED for one in inner)
        if is_skipped or not file.is_file():
            continue
        if file.suffix == ".py" or (
            file.suffix == _NOTEBOOK and b"horovod" in file.read_bytes()
        ):
            yield file
