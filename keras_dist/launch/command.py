"""The command `keras-dist run` and its arguments."""

import argparse
import os
import shlex
from dataclasses import replace

from keras_dist.launch import options as arguments
from keras_dist.launch import slurm_task
from keras_dist.launch.agent import serve
from keras_dist.launch.assignment import patience
from keras_dist.launch.call_agent import serve_call
from keras_dist.launch.discovery import named_by
from keras_dist.launch.elastic import RESTARTS
from keras_dist.launch.elastic import VARIABLE as RANGE
from keras_dist.launch.elastic_jobs import run_elastic
from keras_dist.launch.failures import print_message
from keras_dist.launch.gpus import num_gpus
from keras_dist.launch.hosts import hosts_in, hosts_of, is_here, own_address, slots
from keras_dist.launch.jobs import run_command
from keras_dist.launch.meeting import (
    Meeting,
    host_range,
    meeting_point,
    secret_in,
)
from keras_dist.launch.members import nnodes_text
from keras_dist.launch.monitor.rank_process import end_with
from keras_dist.launch.monitor.watchdog import VARIABLE, limit_of
from keras_dist.launch.programs import command_of
from keras_dist.launch.ranks import Command
from keras_dist.launch.rdzv import run_meeting
from keras_dist.launch.reach import HostLimits, Reach
from keras_dist.launch.restarts import begin_text
from keras_dist.launch.signals import SAVED
from keras_dist.launch.slurm import Task, task_of
from keras_dist.launch.slurm_step import meeting_of, requeue, with_least
from keras_dist.launch.spares import Spares
from keras_dist.launch.startup_noise import VARIABLE as VERBOSE
from keras_dist.launch.transports import transport_of


def add_run(commands: argparse._SubParsersAction) -> None:
    """Add the command `run` to those of `keras-dist`."""
    command = commands.add_parser(
        "run",
        help="start a script on many ranks",
        description=(
            "Start a script on many ranks, and show their output. If one fails, all "
            "ranks are ended, and a report stands at the end of the output: the "
            "traceback of the rank that failed first, then a line for each rank."
        ),
        epilog=(
            "Known lines of TensorFlow that are no news, as about oneDNN and the CPU, "
            f"are not shown. Set {VERBOSE}=1 to see them."
        ),
        usage="%(prog)s -np N [options] (script.py | -m module | program) [arguments]",
    )
    arguments.add_where(command)
    command.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write the output of rank K to DIR/rank.K.log; the screen shows rank 0",
    )
    arguments.add_transport(command)
    arguments.add_limits(command)
    arguments.add_spare(command)
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
    agent = commands.add_parser("call-agent")  # what `keras_dist.ray` and `spark` start
    agent.add_argument("descriptor", type=int, help=argparse.SUPPRESS)
    agent.set_defaults(run=lambda options: serve_call(options.descriptor))
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
    task = _task(options)
    is_elastic = _is_elastic_by_ssh(options)
    if options.spare and (is_elastic or options.hosts or options.hostfile):
        raise ValueError(
            "`--spare` needs commands that stay from start to start, and those that "
            "ssh starts do not. Received: --spare, and hosts for ssh. Start the hosts "
            "by `--nnodes` and `--rdzv`."
        )
    has_meeting = options.rdzv is not None or options.nnodes is not None
    hosts = []
    if task is None and not (has_meeting or is_elastic):
        hosts = hosts_of(_named_hosts(options), options.np)
    environment = patience()
    if options.stall_limit is not None:
        environment[VARIABLE] = str(limit_of(options.stall_limit))
    kind, words = ("module", words) if options.module else command_of(words)
    command = Command(
        kind=kind,
        words=words,
        environment=environment,
        log_dir=options.log_dir,
    )
    command = _with_transport(command, hosts, options)
    if task is not None:
        return _run_step(command, task, options)
    if is_elastic:
        return _run_elastic(command, options)
    if has_meeting:
        return _run_meeting(command, options)
    return _run_by_ssh(command, hosts, options)


def _with_transport(
    command: Command, hosts: list[tuple[str, int]], options: argparse.Namespace
) -> Command:
    """The command, with what its ranks find each other by."""
    transport = transport_of(
        options.transport,
        is_one_host=bool(hosts) and all(is_here(host) for host, _ in hosts),
        num_ranks=sum(count for _, count in hosts),
    )
    may_use_gloo = options.transport == "auto"
    return replace(command, transport=transport, may_use_gloo=may_use_gloo)


def _run_by_ssh(
    command: Command, hosts: list[tuple[str, int]], options: argparse.Namespace
) -> int:
    others = [host for host, _ in hosts if not is_here(host)]
    reach = None
    if others:
        address = own_address(options.address, others[0])
        reach = Reach(shlex.split(options.ssh), address, has_tls=options.tls)
    else:
        hosts = [("localhost", sum(count for _, count in hosts))]
    if options.with_parent is None:
        imports = command.kind != "program"
        print_message(begin_text(dict(hosts), is_importing=imports))
    return run_command(
        command,
        slots(hosts),
        restarts=options.restarts or 0,
        reach=reach,
        spares=Spares() if options.spare else None,
    )


def _is_elastic_by_ssh(options: argparse.Namespace) -> bool:
    """Whether hosts come and go that are reached by ssh."""
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
    command = _with_range(command, least, most)
    limits = HostLimits(
        least=least,
        most=most,
        ssh=shlex.split(options.ssh),
        address=options.address,
        timeout=options.rdzv_timeout,
        has_tls=options.tls,
    )
    listed = dict(hosts_of(hosts, None)) if is_fixed else {}
    named = (lambda: listed) if is_fixed else named_by(script, options.np)
    restarts = RESTARTS if options.restarts is None else options.restarts
    return run_elastic(command, named, limits, restarts=restarts)


def _task(options: argparse.Namespace) -> Task | None:
    """The task of SLURM that this command is, if it says no other way to start."""
    ways = (
        options.hosts,
        options.hostfile,
        options.rdzv,
        None if ":" in (options.nnodes or "") else options.nnodes,
        options.host_discovery_script,
    )
    is_inner = options.with_parent is not None or "HOROVOD_RANK" in os.environ
    task = None if is_inner or ways.count(None) < len(ways) else task_of()
    if task is None and options.requeue:
        raise ValueError(
            "`--requeue` is for jobs of SLURM. Received: --requeue, and no variables "
            "of a step. For example: srun keras-dist run --requeue script.py"
        )
    return task


def _run_step(command: Command, task: Task, options: argparse.Namespace) -> int:
    meeting = meeting_of(
        task,
        num_ranks=options.np,
        secret=secret_in(options.secret_file),
        timeout=options.rdzv_timeout,
    )
    meeting = replace(meeting, has_tls=options.tls, has_spares=options.spare)
    if options.nnodes is not None:
        meeting = with_least(meeting, *host_range(options.nnodes))
    code = run_meeting(*_restarted(command, meeting, options))
    if code == SAVED and options.requeue and task.position == 0:
        requeue(task)
    return code


def _run_meeting(command: Command, options: argparse.Namespace) -> int:
    return run_meeting(*_restarted(command, _meeting(options), options))


def _restarted(
    command: Command, meeting: Meeting, options: argparse.Namespace
) -> tuple[Command, Meeting, int]:
    """The arguments of `run_meeting`: the command, where it meets, and restarts."""
    command = _with_range(command, meeting.min_hosts, meeting.num_hosts)
    usual = RESTARTS if meeting.is_elastic else 0
    restarts = usual if options.restarts is None else options.restarts
    return command, meeting, restarts


def _with_range(command: Command, least: int | None, most: int) -> Command:
    """The command whose ranks know that hosts come and go, if they do."""
    if least in (None, most):
        return command
    environment = {**command.environment, RANGE: nnodes_text(least, most)}
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
    return Meeting(
        address=address,
        port=port,
        num_hosts=most,
        min_hosts=least,
        num_ranks=(num_gpus() or 1) if options.np is None else options.np,
        secret=secret_in(options.secret_file),
        number=options.node_rank,
        timeout=options.rdzv_timeout,
        has_tls=options.tls,
        has_spares=options.spare,
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
