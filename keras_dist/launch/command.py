"""`keras-dist run`: its arguments."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_dist.launch.failures import tell
from keras_dist.launch.jobs import run_command
from keras_dist.launch.ranks import Command
from keras_dist.watch.report import end_with
from keras_dist.watch.watchdog import VARIABLE, limit_of

# Seconds that a rank waits for another one to connect.
_CONNECT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_CONNECT_SECONDS = 120

_HERE = ("localhost", "127.0.0.1")


def add_run(commands: argparse._SubParsersAction) -> None:
    """Add the command `run` to those of `keras-dist`."""
    command = commands.add_parser(
        "run",
        help="start a script on many ranks",
        description=(
            "Start a script on many ranks, show what they print, and end all of them "
            "when one fails: its own error is then the last thing to read."
        ),
        usage="%(prog)s -np N [options] (script.py | -m module | program) [arguments]",
    )
    command.add_argument("-np", type=int, metavar="N", help="how many ranks to start")
    command.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:SLOTS,…",
        help="hosts; other ones than this are left to horovodrun, over ssh",
    )
    command.add_argument(
        "--log-dir", metavar="DIR", help="write what rank K prints to DIR/rank.K.log"
    )
    command.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again after a failure, at most K times (default: 0)",
    )
    command.add_argument(
        "--stall-limit",
        type=float,
        metavar="S",
        help="end the job when no rank makes progress for S seconds, 0 for never "
        "(default: 120)",
    )
    command.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)
    command.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.with_parent is not None:
        end_with(options.with_parent)
    words = options.module or options.words
    if not words:
        raise ValueError(
            "A script to start is needed. Received: none. "
            "For example: keras-dist run -np 2 script.py"
        )
    num_ranks, is_here = ranks_of(options.hosts, options.np)
    environment = {}
    if options.stall_limit is not None:
        environment[VARIABLE] = str(limit_of(options.stall_limit))
    if not is_here:
        return _hand_over(options, words, num_ranks, environment)
    if _CONNECT not in os.environ:
        environment[_CONNECT] = str(_CONNECT_SECONDS)
    kind, words = ("module", words) if options.module else command_of(words)
    command = Command(
        kind=kind,
        words=words,
        environment=environment,
        log_dir=options.log_dir,
    )
    return run_command(command, num_ranks=num_ranks, restarts=options.restarts)


def ranks_of(hosts: str | None, num_ranks: int | None) -> tuple[int, bool]:
    """How many ranks to start, and whether all of them on this host.

    >>> ranks_of("localhost:2", None), ranks_of("a:2,b:2", 3), ranks_of(None, 4)
    ((2, True), (3, False), (4, True))

    Raises:
        ValueError: If hosts are not written so, or have too few slots.
    """
    if hosts is None:
        if num_ranks is None:
            raise ValueError(
                "The number of ranks is needed. Received: neither -np nor -H. "
                "For example: keras-dist run -np 2 script.py"
            )
        return num_ranks, True
    parts = [part.strip().rpartition(":") for part in hosts.split(",")]
    if not all(name and slots.isdecimal() for name, _, slots in parts):
        raise ValueError(
            f"Hosts are names and numbers of ranks, as in a:2,b:2. Received: -H {hosts}"
        )
    num_slots = sum(int(slots) for _, _, slots in parts)
    if num_ranks is not None and num_ranks > num_slots:
        raise ValueError(
            f"There are fewer slots than ranks. Received: -np {num_ranks} -H {hosts}, "
            f"which has {num_slots}."
        )
    is_here = all(name in (*_HERE, os.uname().nodename) for name, _, _ in parts)
    return num_ranks or num_slots, is_here


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """What a command is: a script, a module or a program, and the words without Python.

    `python script.py` is the script, so that its errors are seen.

    Raises:
        ValueError: If there is no such file or program.
    """
    found = Path(shutil.which(words[0]) or "")
    # Not its real path, which environments share.
    is_here = found.absolute().parent == Path(sys.executable).parent
    is_python = is_here and found.name.startswith("python")
    if is_python and words[1:2] == ["-m"] and len(words) > 2:
        return "module", list(words[2:])
    if is_python and words[1:] and words[1].endswith(".py"):
        words = words[1:]
    if words[0].endswith(".py") and Path(words[0]).is_file():
        return "script", list(words)
    if shutil.which(words[0]) is None:
        raise ValueError(f"There is no such script or program. Received: {words[0]}")
    return "program", list(words)


def _hand_over(
    options: argparse.Namespace,
    words: Sequence[str],
    num_ranks: int,
    environment: dict[str, str],
) -> int:
    """Become `horovodrun`, which knows how to reach other hosts."""
    if options.restarts or options.log_dir:
        raise ValueError(
            "On other hosts than this one the ranks are started by horovodrun. "
            "Received: --restarts or --log-dir, which it does not know."
        )
    python = [sys.executable, *(["-m"] if options.module else [])]
    is_python = options.module or words[0].endswith(".py")
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [horovodrun, "-np", str(num_ranks), "-H", options.hosts]
    tell("keras-dist: other hosts than this one: starting horovodrun.")
    os.environ.update(environment)
    os.execv(horovodrun, command + (python if is_python else []) + list(words))
