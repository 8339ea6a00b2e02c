"""The command `keras-dist run`: its options, and which way starts the job."""

import argparse
import os
import shlex
from dataclasses import replace

from keras_dist.launch import environments
from keras_dist.launch.agent import serve
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import (
    Meeting,
    is_here,
    num_gpus,
    parse_host_count,
    parse_hosts,
    read_hostfile,
)
from keras_dist.launch.job import begin_text, run_by_ssh, run_locally
from keras_dist.launch.meeting import (
    TIMEOUT_SECONDS,
    parse_endpoint,
    read_secret,
    run_meeting,
)
from keras_dist.launch.monitor.rank_process import end_with
from keras_dist.launch.monitor.watchdog import VARIABLE, limit_of
from keras_dist.launch.ranks import (
    Command,
    connect_timeout,
    dry_run_text,
    parse_command,
)
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.ssh import Ssh
from keras_dist.launch.startup_noise import VARIABLE as VERBOSE

# A firewall that drops port 22 is noticed after 10 s, not 134.
_SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10"


def add_where(command: argparse.ArgumentParser) -> None:
    """Options that say how many ranks to start, and on which hosts."""
    command.add_argument(
        "-np",
        type=int,
        metavar="N",
        help="how many ranks to start (default: one for each GPU of this host; with "
        "`-H` one for each slot)",
    )
    add_hosts(command)
    _add_meeting(command)


def add_hosts(command: argparse.ArgumentParser) -> None:
    """Options for hosts that are reached by ssh."""
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


def _add_meeting(command: argparse.ArgumentParser) -> None:
    """Options for hosts that meet."""
    command.add_argument(
        "--nnodes",
        metavar="N",
        help="number of hosts; start this command on each. -np is then the ranks of "
        "this one (default: one for each GPU, or 1)",
    )
    command.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="number of this host, from 0 (default: as they come)",
    )
    command.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="where they meet: the first host, and a free port there",
    )
    command.add_argument(
        "--rdzv-timeout",
        type=float,
        default=TIMEOUT_SECONDS,
        metavar="S",
        help=f"wait S seconds for the others (default: {TIMEOUT_SECONDS:g})",
    )
    command.add_argument(
        "--secret-file",
        metavar="FILE",
        help=f"a file with the job's secret (default: the variable {SECRET})",
    )


def add_limits(command: argparse.ArgumentParser) -> None:
    """Options for restarts and limits."""
    command.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start all ranks again after one has failed, at most K times (default: 0)",
    )
    command.add_argument(
        "--stall-limit",
        type=float,
        metavar="S",
        help="end the job when no rank makes progress for S seconds, 0 for never "
        "(default: 120)",
    )


def add_run(commands: argparse._SubParsersAction) -> None:
    """Add the command `run` to those of `keras-dist`."""
    command = commands.add_parser(
        "run",
        help="start a script on many ranks",
        description=(
            "Start a script on many ranks, and show their output. If one fails, all "
            "ranks are ended, and a report is printed at the end of the output: the "
            "traceback of the rank that failed first, then a line for each rank."
        ),
        epilog=(
            "Routine log lines of TensorFlow, such as those about oneDNN and the CPU, "
            f"are hidden. Set {VERBOSE}=1 to see them."
        ),
        usage="%(prog)s -np N [options] (script.py | -m module | program) [arguments]",
    )
    add_where(command)
    command.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write the output of rank K to DIR/rank.K.log; the screen shows rank 0",
    )
    add_limits(command)
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the ranks, their hosts, devices, variables and command; start none",
    )
    command.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)
    command.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)
    _add_inner(commands)


def _add_inner(commands: argparse._SubParsersAction) -> None:
    """Add the commands that only keras_dist calls; without a help they are hidden."""
    agent = commands.add_parser("host-agent")  # what `run` starts on other hosts
    agent.set_defaults(run=lambda options: serve())


def _run(options: argparse.Namespace) -> int:
    if options.with_parent is not None:
        end_with(options.with_parent)
    words = options.module or options.words
    if words[:1] == ["--"]:  # as is the custom where options end
        words = words[1:]
    if not words:
        raise ValueError(
            "A script to start is needed. Received: none. "
            "For example: keras-dist run -np 2 script.py"
        )
    meeting = _meeting(options)
    hosts: dict[str, int] = {}
    if meeting is None:
        hosts = dict(parse_hosts(_named_hosts(options), options.np))
    ranks = sum(hosts.values()) if meeting is None else meeting.num_ranks or 0
    if (
        min(ranks, 1 if meeting is None else meeting.num_hosts) < 1
        or options.restarts < 0
    ):
        raise ValueError(
            "At least one rank is needed, on at least one host, and no negative number "
            f"of restarts. Received: -np {ranks} --nnodes {options.nnodes} "
            f"--restarts {options.restarts}"
        )
    command = _command(words, options)
    if options.dry_run:
        print(dry_run_text(command, hosts))
        return 0
    if meeting is None:
        return _run_on(hosts, command, options)
    return run_meeting(
        command,
        meeting,
        read_secret(options.secret_file),
        restarts=options.restarts,
        timeout=options.rdzv_timeout,
    )


def _command(words: list[str], options: argparse.Namespace) -> Command:
    environment = connect_timeout()
    if options.stall_limit is not None:
        environment[VARIABLE] = str(limit_of(options.stall_limit))
    kind, words = ("module", words) if options.module else parse_command(words)
    return Command(kind, words, environment, options.log_dir)


def _meeting(options: argparse.Namespace) -> Meeting | None:
    """Return where hosts meet, by the options or a scheduler; `None` if they do not."""
    hosts = _named_hosts(options)
    if options.rdzv is None and options.nnodes is None:
        is_inner = options.with_parent is not None or "HOROVOD_RANK" in os.environ
        found = None if hosts or is_inner else environments.detect()
        if found is None:
            return None
    elif hosts is not None or options.rdzv is None or options.nnodes is None:
        raise ValueError(
            "Hosts that meet need `--nnodes` and `--rdzv`, and no `-H`, which starts "
            f"them by ssh. Received: --nnodes {options.nnodes} --rdzv {options.rdzv} "
            f"-H {hosts}. For example: --nnodes 2 --rdzv a:29400"
        )
    else:
        address, port = parse_endpoint(options.rdzv)
        num_hosts = parse_host_count(options.nnodes, source="--nnodes")
        found = Meeting(address, port, num_hosts, number=options.node_rank)
    count = found.num_ranks if options.np is None else options.np
    return replace(found, num_ranks=num_gpus() or 1 if count is None else count)


def _run_on(
    hosts: dict[str, int], command: Command, options: argparse.Namespace
) -> int:
    """Start ranks on this host, or on others by ssh."""
    is_local = all(is_here(host) for host in hosts)
    count, restarts = sum(hosts.values()), options.restarts
    if options.with_parent is None:
        imports = command.kind != "program"
        shown = {"localhost": count} if is_local else hosts
        print_message(begin_text(shown, is_importing=imports))
    if is_local:
        return run_locally(command, count, restarts=restarts)
    ssh = Ssh(shlex.split(options.ssh), options.address)
    return run_by_ssh(
        command, hosts, ssh, restarts=restarts, timeout=options.rdzv_timeout
    )


def _named_hosts(options: argparse.Namespace) -> str | None:
    if options.hostfile is None:
        return options.hosts
    if options.hosts is not None:
        raise ValueError(
            "Hosts are named by `-H` or by `--hostfile`. "
            f"Received: -H {options.hosts} and --hostfile {options.hostfile}"
        )
    return read_hostfile(options.hostfile)
