"""The command `keras-dist migrate`."""

import argparse
import difflib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_dist.migrate.report import Migrated

_INSTALL = "pip install 'keras-dist[migrate]'"
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


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
    files = list(_files(options.paths))
    done = [(path, path.read_bytes(), migrate(path.read_bytes())) for path in files]
    for path, old, new in done:
        sys.stdout.write(difference(_shown(path), old, new))
    sys.stdout.flush()
    for path, _, new in done:
        for finding in new.findings:
            print(finding.text(str(path)), file=sys.stderr)
    if options.write:
        for path, old, new in done:
            if new.source != old:
                _replace(path, new.source)
    return 0 if all(new.is_whole for _, _, new in done) else 1


def _tool(target: str) -> Any:
    # libcst is needed by this command alone.
    name = "source" if target == "horovod" else "fit"
    try:
        module = importlib.import_module(f"keras_dist.migrate.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("libcst", "yaml"):
            raise
        raise RuntimeError(
            "keras-dist migrate reads scripts with libcst, which is not installed. "
            f"Install it: {_INSTALL}"
        ) from None
    return module.migrate


def difference(path: str, old: bytes, new: Migrated) -> str:
    """The unified diff of one file, empty where nothing changed.

    Args:
        path: The name of the file, which is shown.
        old: Its text before.
        new: Its text after.
    """
    before, after = (
        text.decode("utf-8", "surrogateescape").splitlines(keepends=True)
        for text in (old, new.source)
    )
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    ended = (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )
    return "".join(ended).encode("utf-8", "replace").decode()


def _shown(path: Path) -> str:
    """Its name in the diff, which `git apply` and `patch -p1` find from this folder."""
    here = Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    return str(path).lstrip("/")


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """The scripts themselves, and those in folders, each once."""
    seen = set()
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"There is no such file or folder. Received: {name}")
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in found:
            folder = file.relative_to(path).parent if path.is_dir() else Path()
            inner = folder.as_posix().split("/") if folder != Path() else []
            is_skipped = any(one.startswith(".") or one in _SKIPPED for one in inner)
            if file.is_file() and not is_skipped and file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def _replace(path: Path, text: bytes) -> None:
    """Write a file whole or not at all; a link stays one, and the mode is kept."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
