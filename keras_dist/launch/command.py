"""The command `keras-dist run`: its options, and which way starts the job."""

import argparse
import os
import shlex
from dataclasses import replace

from keras_dist.launch import environments, slurm_task
from keras_dist.launch.agent import serve
from keras_dist.launch.coordinator import Plan
from keras_dist.launch.environments import Environment
from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import (
    host_range,
    hosts_in,
    hosts_of,
    is_here,
    nnodes_text,
    num_gpus,
)
from keras_dist.launch.local import run_locally
from keras_dist.launch.meeting import (
    TIMEOUT_SECONDS,
    Meeting,
    meeting_in,
    meeting_point,
    run_meeting,
    secret_in,
)
from keras_dist.launch.monitor.rank_process import end_with
from keras_dist.launch.monitor.watchdog import VARIABLE, limit_of
from keras_dist.launch.ranks import Command, command_of, connect_timeout, dry_run_text
from keras_dist.launch.restarts import NNODES, RESTARTS, begin_text
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.ssh import DiscoveredHosts, NamedHosts, Ssh, run_by_ssh
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
        "--host-discovery-script",
        metavar="COMMAND",
        help="a command that prints a line HOST:SLOTS for each host that is there now; "
        "with `--nnodes MIN:MAX`",
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
        "this one (default: one for each GPU, or 1). As MIN:MAX, hosts may be lost, "
        "and others may come, while the job runs; with -H, too",
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
        "--max-restarts",
        type=int,
        metavar="K",
        help="start again after a failure, at most K times (default: 0; with "
        f"`--nnodes MIN:MAX` {RESTARTS})",
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
    task = commands.add_parser("slurm-task")  # what tasks of `srun` start
    task.set_defaults(run=lambda options: slurm_task.serve())


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
    environment = _environment(options)
    is_elastic = _is_elastic_by_ssh(options)
    is_meeting = options.rdzv is not None or options.nnodes is not None
    hosts: dict[str, int] = {}
    if environment is None and not (is_meeting or is_elastic):
        hosts = dict(hosts_of(_named_hosts(options), options.np))
    command = _command(words, options)
    if options.dry_run:
        print(dry_run_text(command, hosts))
        return 0
    if is_elastic:
        return _run_elastic(command, options)
    if environment is not None:
        return _run_in(environment, command, options)
    if is_meeting:
        return run_meeting(*_with_restarts(command, _meeting(options), options))
    return _run_on(hosts, command, options)


def _command(words: list[str], options: argparse.Namespace) -> Command:
    environment = connect_timeout()
    if options.stall_limit is not None:
        environment[VARIABLE] = str(limit_of(options.stall_limit))
    kind, words = ("module", words) if options.module else command_of(words)
    return Command(kind, words, environment, options.log_dir)


def _environment(options: argparse.Namespace) -> Environment | None:
    """Return what a scheduler says, if the user names no other way to start."""
    ways = (
        options.hosts,
        options.hostfile,
        options.rdzv,
        None if ":" in (options.nnodes or "") else options.nnodes,
        options.host_discovery_script,
    )
    is_inner = options.with_parent is not None or "HOROVOD_RANK" in os.environ
    is_named = is_inner or ways.count(None) < len(ways)
    return None if is_named else environments.detect()


def _run_on(
    hosts: dict[str, int], command: Command, options: argparse.Namespace
) -> int:
    """Start a fixed number of ranks, on this host or by ssh."""
    is_local = all(is_here(host) for host in hosts)
    count, restarts = sum(hosts.values()), options.restarts or 0
    if options.with_parent is None:
        imports = command.kind != "program"
        shown = {"localhost": count} if is_local else hosts
        print_message(begin_text(shown, is_importing=imports))
    if is_local:
        return run_locally(command, count, restarts=restarts)
    plan = Plan(
        num_hosts=len(hosts),
        restarts=restarts,
        timeout=options.rdzv_timeout,
        names=list(hosts),
        is_announced=True,
    )
    return run_by_ssh(command, NamedHosts(hosts), _ssh(options), plan)


def _ssh(options: argparse.Namespace) -> Ssh:
    return Ssh(shlex.split(options.ssh), options.address)


def _is_elastic_by_ssh(options: argparse.Namespace) -> bool:
    """Return whether hosts come and go that are reached by ssh."""
    has_range = ":" in (options.nnodes or "") and options.rdzv is None
    has_names = options.hosts is not None or options.hostfile is not None
    return options.host_discovery_script is not None or (has_range and has_names)


def _run_elastic(command: Command, options: argparse.Namespace) -> int:
    script, hosts = options.host_discovery_script, _named_hosts(options)
    is_fixed = script is None
    others = options.np if is_fixed else hosts or options.rdzv
    if options.nnodes is None or others is not None:
        raise ValueError(
            "Hosts that come and go by ssh need `--nnodes MIN:MAX`, and `-H` without "
            "`-np`, or `--host-discovery-script` without `-H` and `--rdzv`. Received: "
            f"--nnodes {options.nnodes} -H {hosts} -np {options.np} "
            f"--host-discovery-script {script} --rdzv {options.rdzv}"
        )
    least, most = host_range(options.nnodes)
    plan = Plan(
        num_hosts=most,
        restarts=RESTARTS if options.restarts is None else options.restarts,
        timeout=options.rdzv_timeout,
        min_hosts=least,
    )
    named = (
        NamedHosts(dict(hosts_of(hosts, None)))
        if is_fixed
        else DiscoveredHosts(script, options.np)
    )
    return run_by_ssh(_with_range(command, least, most), named, _ssh(options), plan)


def _run_in(
    environment: Environment, command: Command, options: argparse.Namespace
) -> int:
    """Take part in a job whose hosts a scheduler has started."""
    meeting = meeting_in(
        environment,
        num_ranks=options.np,
        secret=secret_in(options.secret_file),
        timeout=options.rdzv_timeout,
    )
    if options.nnodes is not None:
        meeting = _with_least(meeting, *host_range(options.nnodes))
    return run_meeting(*_with_restarts(command, meeting, options))


def _with_least(meeting: Meeting, least: int, most: int) -> Meeting:
    """Return the meeting of hosts of which some may be lost; no others come.

    Raises:
        ValueError: If there is another number of hosts.
    """
    if not 1 <= least <= meeting.plan.num_hosts <= most:
        raise ValueError(
            "Where a scheduler starts the hosts, `--nnodes` says how few of them are "
            f"enough, and at most as many as there are. Received: --nnodes "
            f"{least}:{most}, and {meeting.plan.num_hosts} tasks."
        )
    return replace(meeting, plan=replace(meeting.plan, min_hosts=least))


def _with_restarts(
    command: Command, meeting: Meeting, options: argparse.Namespace
) -> tuple[Command, Meeting]:
    """Return the arguments of `run_meeting`."""
    plan = meeting.plan
    usual = RESTARTS if plan.is_elastic else 0
    restarts = usual if options.restarts is None else options.restarts
    command = _with_range(command, plan.min_hosts, plan.num_hosts)
    return command, replace(meeting, plan=replace(plan, restarts=restarts))


def _with_range(command: Command, least: int | None, most: int) -> Command:
    """Let the ranks of a command know that hosts come and go, if they do."""
    if least in (None, most):
        return command
    environment = {**command.environment, NNODES: nnodes_text(least, most)}
    return replace(command, environment=environment)


def _meeting(options: argparse.Namespace) -> Meeting:
    hosts = _named_hosts(options)
    if hosts is not None or options.rdzv is None or options.nnodes is None:
        raise ValueError(
            "Hosts that meet need `--nnodes` and `--rdzv`, and no `-H`, which starts "
            f"them by ssh. Received: --nnodes {options.nnodes} --rdzv {options.rdzv} "
            f"-H {hosts}. For example: --nnodes 2 --rdzv a:29400"
        )
    address, port = meeting_point(options.rdzv)
    least, most = host_range(options.nnodes)
    plan = Plan(
        num_hosts=most,
        min_hosts=least,
        timeout=options.rdzv_timeout,
        meeting=f"{address}:{port}",
    )
    return Meeting(
        address=address,
        port=port,
        plan=plan,
        num_ranks=(num_gpus() or 1) if options.np is None else options.np,
        secret=secret_in(options.secret_file),
        number=options.node_rank,
    )


def _named_hosts(options: argparse.Namespace) -> str | None:
    if options.hostfile is None:
        return options.hosts
    if options.hosts is not None:
        raise ValueError(
            "Hosts are named by `-H` or by `--hostfile`. "
            f"Received: -H {options.hosts} and --hostfile {options.hostfile}"
        )
    return hosts_in(options.hostfile)
