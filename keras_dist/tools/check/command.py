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
from collections.abc import Sequence
from pathlib import Path

from keras_dist.launch.gpus import num_gpus
from keras_dist.launch.hosts import Slot
from keras_dist.launch.monitor.status_store import status_store_of
from keras_dist.launch.options import add_where
from keras_dist.launch.slurm import task_of
from keras_dist.tools.check.launches import Launcher
from keras_dist.tools.check.options import add_inner, inner_words
from keras_dist.tools.check.result import BEGUN, FAILED, UNTRIED, Result, holds
from keras_dist.tools.check.screen import Screen
from keras_dist.tools.check.stages import CONNECT, ENVIRONMENT, STAGES, Stage, stages
from keras_dist.version import __version__

# Ranks where nothing says how many: enough to see that they work with one another.
_RANKS = 2


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
    add_inner(rank)
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
    task, results = task_of(), []
    # Tasks of SLURM have one screen, and often one file system.
    is_first = task is None or task.position == 0
    screen = Screen(None if is_first else io.StringIO())
    command = shlex.join(["keras-dist", *sys.argv[1:]])
    screen.title(f"{command}  (keras_dist {__version__})")

    def show(result: Result) -> None:
        if result.status == BEGUN:
            screen.running(f"{result.group}: {result.name}")
        else:
            results.append(result)
            screen.show(result)

    is_whole = False
    try:
        for stage in to_run:
            if _has_failed(CONNECT, results):
                for key in stage.checks:
                    show(Result(*key, UNTRIED, "the ranks could not connect"))
                continue
            screen.running(stage.name)
            launcher.run(stage, inner_words(options), show)
        screen.summary(results)
        is_whole = True
    finally:
        if options.json and is_first:
            _write(Path(options.json), results, command, is_whole=is_whole)
    return 0 if holds(results) else 1


def where_words(options: argparse.Namespace, num_ranks: int = 0) -> list[str]:
    """The options of `keras-dist run` that say where ranks start, as they were given.

    Args:
        options: The parsed options of `check` or `env`.
        num_ranks: Ranks where nothing says how many; 0 for one for each GPU, or two.
    """
    known = argparse.ArgumentParser(add_help=False)
    add_where(known)
    given = vars(options)
    words = []
    for action in known._actions:
        value = given[action.dest]
        if value != action.default:
            words += [action.option_strings[0], str(value)]
    names = ("np", "hosts", "hostfile", "nnodes", "rdzv", "host_discovery_script")
    is_step = task_of() is not None
    if not is_step and all(given.get(name) is None for name in names):
        words += ["-np", str(num_ranks or num_gpus() or _RANKS)]
    # The ranks end with this process, also if it is killed. Under SLURM, `run` looks
    # for a step only where nobody else has started it.
    return words if is_step else [*words, "--with-parent", str(os.getpid())]


def _has_failed(key: tuple[str, str], results: Sequence[Result]) -> bool:
    return any(r.key == key and r.status == FAILED for r in results)


def _write(
    path: Path, results: Sequence[Result], command: str, *, is_whole: bool
) -> None:
    """Write all results, or those until Ctrl-C, whole or not at all."""
    content = {
        "keras_dist": __version__,
        "command": command,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "is_whole": is_whole,
        "holds": is_whole and holds(list(results)),
        "results": [vars(result) for result in results],
    }
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.draft")
    draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    draft.replace(path)


def _rank(options: argparse.Namespace) -> int:
    """What a rank of the first stage runs: without the package, and so TensorFlow."""
    environment = importlib.import_module("keras_dist.tools.check.environment")
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    numbers = {name: int(os.environ[f"HOROVOD_{name.upper()}"]) for name in names}
    slot = Slot(host=os.environ["HOROVOD_HOSTNAME"], **numbers)
    environment.run(options.checks, options.script, slot, status_store_of())
    return 0
