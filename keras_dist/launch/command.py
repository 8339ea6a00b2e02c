"""The command `keras-dist run` and its arguments."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_dist.launch.agent import serve
from keras_dist.launch.call_agent import serve_call
from keras_dist.launch.hosts import address_towards, hosts_in, hosts_of, is_here, slots
from keras_dist.launch.jobs import run_command
from keras_dist.launch.ranks import Command
from keras_dist.launch.remote_hosts import Reach
from keras_dist.launch.startup_noise import VARIABLE as VERBOSE
from keras_dist.monitor.rank_process import end_with
from keras_dist.monitor.watchdog import VARIABLE, limit_of

# Seconds for which a rank waits for the others to connect.
_CONNECT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_CONNECT_SECONDS = 120

# A firewall that drops port 22 is noticed after 10 s, not 134.
_SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10"


def add_run(commands: argparse._SubParsersAction) -> None:
    """Add the command `run` to those of `keras-dist`."""
    command = commands.add_parser(
        "run",
        help="start a script on many ranks",
        description=(
            "Start a script on many ranks, and show their output. If one fails, all "
            "ranks are ended, and its error is printed last."
        ),
        epilog=(
            "TensorFlow's start-up lines about oneDNN, CUDA and the CPU are not shown. "
            f"Set {VERBOSE}=1 to see them."
        ),
        usage="%(prog)s -np N [options] (script.py | -m module | program) [arguments]",
    )
    command.add_argument("-np", type=int, metavar="N", help="how many ranks to start")
    _add_hosts(command)
    command.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write the output of rank K to DIR/rank.K.log; the screen shows rank 0",
    )
    _add_limits(command)
    command.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)
    command.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)
    agent = commands.add_parser(
        "host-agent", help="what `run` starts on other hosts; not to be called by you"
    )
    agent.set_defaults(run=lambda options: serve())
    agent = commands.add_parser(
        "call-agent",
        help="what `keras_dist.ray` and `keras_dist.spark` start; not to be called "
        "by you",
    )
    agent.add_argument("descriptor", type=int, help=argparse.SUPPRESS)
    agent.set_defaults(run=lambda options: serve_call(options.descriptor))


def _add_hosts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:SLOTS,…",
        help="hosts, reached by ssh (default: this one)",
    )
    command.add_argument(
        "--hostfile",
        metavar="FILE",
        help="the same from a file: a line `HOST slots=N` for each",
    )
    command.add_argument(
        "--ssh",
        default=_SSH,
        metavar="COMMAND",
        help=f"command that connects to other hosts (default: {_SSH})",
    )
    command.add_argument(
        "--address",
        metavar="IP",
        help="address at which other hosts reach this one (default: found by routing)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
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


def _run(options: argparse.Namespace) -> int:
    if options.with_parent is not None:
        end_with(options.with_parent)
    words = options.module or options.words
    if not words:
        raise ValueError(
            "A script to start is needed. Received: none. "
            "For example: keras-dist run -np 2 script.py"
        )
    hosts = hosts_of(_named_hosts(options), options.np)
    environment = {}
    if options.stall_limit is not None:
        environment[VARIABLE] = str(limit_of(options.stall_limit))
    if _CONNECT not in os.environ:
        environment[_CONNECT] = str(_CONNECT_SECONDS)
    kind, words = ("module", words) if options.module else command_of(words)
    command = Command(
        kind=kind,
        words=words,
        environment=environment,
        log_dir=options.log_dir,
    )
    others = [host for host, _ in hosts if not is_here(host)]
    reach = None
    if others:
        address = options.address or address_towards(others[0])
        reach = Reach(shlex.split(options.ssh), address)
    else:
        hosts = [("localhost", sum(count for _, count in hosts))]
    return run_command(command, slots(hosts), restarts=options.restarts, reach=reach)


def _named_hosts(options: argparse.Namespace) -> str | None:
    if options.hostfile is None:
        return options.hosts
    if options.hosts is not None:
        raise ValueError(
            "Hosts are named by `-H` or by `--hostfile`. "
            f"Received: -H {options.hosts} and --hostfile {options.hostfile}"
        )
    return hosts_in(options.hostfile)


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The kind of a command (script, module or program), and its words without Python.

    `python script.py` counts as a script, so that its errors are reported.

    Raises:
        ValueError: If there is no such file or program.
    """
    found = Path(shutil.which(words[0]) or "")
    # Not the resolved path, which is the same in several environments.
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
