"""The commands `keras-dist check` and `keras-dist env`."""

import argparse
import datetime
import importlib
import io
import json
import os
import secrets
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keras_dist.launch import environments
from keras_dist.launch.command import add_where
from keras_dist.launch.hosts import num_gpus
from keras_dist.report import write_whole
from keras_dist.tools.check.checks import (
    BEGUN,
    CONNECT,
    ENVIRONMENT,
    FAILED,
    OK,
    STAGES,
    UNTRIED,
    WARNING,
    Result,
    Stage,
    add_rank_arguments,
    holds,
    run_stage,
    stages,
)
from keras_dist.tools.check.launches import Launcher
from keras_dist.tools.launcher import given_words
from keras_dist.version import __version__

if TYPE_CHECKING:
    from keras_dist.tools.screen import Screen

# Ranks where nothing says how many: enough to see that they work together.
_RANKS = 2

# For each status its sign, its color, and its name in the summary.
_STATES = {
    OK: ("✔", "green", "holds"),
    FAILED: ("✘", "red", "failed"),
    WARNING: ("!", "yellow", "to be looked at"),
    UNTRIED: ("–", "dim", "not tried"),
}
_NAME_WIDTH = 13


def add_check(commands: argparse._SubParsersAction) -> None:
    """Add the commands `check` and `env` to those of `keras-dist`."""
    check = commands.add_parser(
        "check",
        help="try on these machines whether all is right",
        description=(
            "Start ranks as `run` does, and try on them environment, devices, "
            "collectives, training, resuming and speed. Each check is a line: what "
            "was seen, and what to do where it failed. The exit code is 0 if none did."
        ),
    )
    add_where(check)
    _add_output(check)
    _add_limits(check)
    check.set_defaults(run=_check)
    env = commands.add_parser(
        "env",
        help="print versions, system and network, for a report of an error",
        description="Print the first group of `keras-dist check` alone.",
    )
    add_where(env)
    _add_output(env)
    env.set_defaults(run=_env)
    rank = commands.add_parser("check-rank")  # what `check` starts; hidden
    add_rank_arguments(rank)
    rank.set_defaults(run=_rank)


def _add_limits(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--resume-folder",
        metavar="DIR",
        help="where to save, kill and resume a training (default: the folder for "
        "temporary files)",
    )
    check.add_argument(
        "--quick",
        action="store_true",
        help="no speed, and collectives of at most 16 MB",
    )
    check.add_argument(
        "--no-speed",
        action="store_true",
        help="do not measure the speed, which takes minutes on a CPU",
    )
    check.add_argument(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for each group of checks (default: 300, and 1800 for the speed)",
    )
    check.add_argument(
        "--only",
        metavar="GROUPS",
        help="run these groups alone: "
        + ",".join(stage.name for stage in STAGES)
        + " (default: all)",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", metavar="FILE", help="write all results to this file, too"
    )
    command.add_argument(
        "script",
        nargs="?",
        help="your script, which has to be the same on all hosts",
    )


def _check(options: argparse.Namespace) -> int:
    has_speed = not (options.no_speed or options.quick)
    to_run = stages(options.only, has_speed=has_speed)
    return _run(options, to_run, options.time_limit)


def _env(options: argparse.Namespace) -> int:
    options.quick, options.resume_folder = True, None
    return _run(options, [ENVIRONMENT], None, num_ranks=1)


def _run(
    options: argparse.Namespace,
    to_run: Sequence[Stage],
    seconds: float | None,
    *,
    num_ranks: int = 0,
) -> int:
    if seconds is not None and seconds <= 0:
        raise ValueError(
            f"A time limit must be positive. Received: --time-limit {seconds:g}"
        )
    launcher = Launcher(where_words(options, num_ranks), seconds)
    results: list[Result] = []
    # Tasks of SLURM have one screen, and often one file system.
    found = environments.detect()
    is_first = found is None or not found.is_quiet or found.host_number == 0
    command = shlex.join(["keras-dist", *sys.argv[1:]])

    def show(result: Result) -> None:
        if result.status == BEGUN:
            screen.running(f"  … {result.group}: {result.name}")
        else:
            if not results or result.group != results[-1].group:
                screen.line(f"\n{result.group}")
            results.append(result)
            show_result(screen, result)

    is_whole = False
    module = importlib.import_module("keras_dist.tools.screen")  # needs `rich`
    try:
        with module.Screen(None if is_first else io.StringIO()) as screen:
            screen.line(f"{command}  (keras_dist {__version__})")
            for stage in to_run:
                if any(r.key == CONNECT and r.status == FAILED for r in results):
                    for key in stage.checks:
                        show(Result(*key, UNTRIED, "the ranks could not connect"))
                    continue
                screen.running(f"  … {stage.name}")
                launcher.run(stage, rank_words(options), show)
            screen.line(summary_of(results))
        is_whole = True
    finally:
        if options.json and is_first:
            content = {
                "keras_dist": __version__,
                "command": command,
                "time": datetime.datetime.now(datetime.UTC).isoformat(
                    timespec="seconds"
                ),
                "is_whole": is_whole,
                "holds": is_whole and holds(results),
                "results": [vars(result) for result in results],
            }
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            write_whole(Path(options.json), text)
    return 0 if holds(results) else 1


def where_words(options: argparse.Namespace, num_ranks: int = 0) -> list[str]:
    """Return the options of `keras-dist run` that say where ranks start, as given.

    Args:
        options: The parsed options of `check` or `env`.
        num_ranks: Ranks where nothing says how many; 0 for one for each GPU, or two.
    """
    words = given_words(options, add_where)
    if environments.detect() is not None:
        # `run` asks a scheduler for hosts only where nobody else has started it.
        return words
    names = ("np", "hosts", "hostfile", "nnodes", "rdzv", "host_discovery_script")
    if all(getattr(options, name) is None for name in names):
        words += ["-np", str(num_ranks or num_gpus() or _RANKS)]
    # The ranks end with this process, even if it is killed.
    return [*words, "--with-parent", str(os.getpid())]


def rank_words(options: argparse.Namespace) -> list[str]:
    """Return the arguments of the ranks of a stage."""
    words = ["--script", options.script] if options.script else []
    if options.resume_folder:
        words += ["--folder", options.resume_folder]
    words += ["--run-name", secrets.token_hex(4)]
    return words + ["--quick"] * options.quick


def _rank(options: argparse.Namespace) -> int:
    """Run a rank of the first stage, without the package, and so TensorFlow."""
    run_stage(options)
    return 0


def show_result(screen: "Screen", result: Result) -> None:
    """Show the lines of a result."""
    first, *rest = lines_of(result, width=screen.width)
    screen.line(first, style=_STATES[result.status][1], sign=2)
    for line in rest:
        screen.line(line)


def lines_of(result: Result, *, width: int) -> list[str]:
    """Return the lines of one result, wrapped to a width if their words allow it.

    >>> print(*lines_of(Result("devices", "memory", OK, "2 GiB free"), width=40))
      ✔ memory       2 GiB free
    """
    indent = " " * (4 + _NAME_WIDTH)
    begin = f"  {_STATES[result.status][0]} {result.name:<{_NAME_WIDTH - 1}} "
    paragraphs = [(begin, indent, text) for text in (result.seen or "–").splitlines()]
    paragraphs[1:] = [(indent, indent, text) for _, _, text in paragraphs[1:]]
    if result.cure and result.status != OK:
        paragraphs.append((f"{indent}→ ", f"{indent}  ", result.cure))
    return [
        line
        for first, further, text in paragraphs
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=first,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def summary_of(results: Sequence[Result]) -> str:
    """Say how many checks hold."""
    texts = []
    for status, (_, _, name) in _STATES.items():
        count = sum(result.status == status for result in results)
        if count > 1:
            name = name.replace("holds", "hold")
        if count:
            texts.append(f"{count} {name}")
    return f"\n{', '.join(texts)}"
