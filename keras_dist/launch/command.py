"""The command `keras-dist run`: its options, and the hosts of the job."""

import argparse
import os
import secrets
from collections.abc import Sequence

from keras_dist.clusters import Place, find_place
from keras_dist.clusters.numbered import IndexedJob
from keras_dist.launch.hosts import (
    LOOPBACK,
    is_here,
    num_gpus,
    parse_endpoint,
    parse_hosts,
    read_hostfile,
)
from keras_dist.launch.job import run_job
from keras_dist.launch.monitor.rank_process import DISTRIBUTE, end_with
from keras_dist.launch.ranks import Command, parse_command
from keras_dist.launch.signing import VARIABLE as SECRET
from keras_dist.launch.ssh import read_environment, run_by_ssh
from keras_dist.launch.time_limits import set_stall

_NAME, _SHORTEST_SECRET = "keras-dist run", 16
_BATCH = "global"  # of `--distribute`


def add_where(command: argparse.ArgumentParser) -> None:
    """Add the options that say how many ranks to start, and on which hosts."""
    command.add_argument(
        "-np",
        type=int,
        metavar="N",
        help="number of ranks to start (default: one for each GPU of this host; with "
        "`-H`, one for each slot)",
    )
    named = command.add_mutually_exclusive_group()
    named.add_argument(
        "-H",
        dest="hosts",
        metavar="HOST:SLOTS,…",
        help="hosts to start on, by ssh (default: this host)",
    )
    named.add_argument(
        "--hostfile",
        metavar="FILE",
        help="file with these hosts: a line `HOST slots=N` for each",
    )
    command.add_argument(
        "--nnodes",
        type=int,
        metavar="N",
        help="number of hosts; start this command on each. -np is then the number of "
        "ranks of this host (default: one for each GPU, or 1)",
    )
    command.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="number of this host; 0 is the first host",
    )
    command.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="where the hosts meet: an address of the first host that the others can "
        "reach, and a free port there (with `-H`, default: its name and a random port)",
    )


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `run` to the commands of `keras-dist`."""
    command = commands.add_parser(
        "run",
        help="start a script on many ranks",
        description=(
            "Start a script on many ranks, and show their output. If one fails, all "
            "ranks are stopped, and a report is printed at the end of the output: the "
            "traceback of the rank that failed first, then a line for each rank."
        ),
        usage="%(prog)s -np N [options] (script.py | -m module | program) [arguments]",
    )
    add_where(command)
    command.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write output of rank K to DIR/rank.K.log; the screen shows only rank 0",
    )
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
        help="end the job if no rank makes progress for S seconds; 0: never "
        "(default: 120)",
    )
    command.add_argument(
        "--distribute",
        action="store_true",
        help="let every fit, evaluate and predict of an unchanged script use all ranks "
        f"(batch={_BATCH!r} unless {DISTRIBUTE}=rank)",
    )
    # Hidden: by `keras_dist.run`, and by `-H` on each host.
    command.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)
    command.add_argument("--over-ssh", action="store_true", help=argparse.SUPPRESS)
    command.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Run the command of the ranks on all hosts; return the exit code."""
    if options.with_parent is not None:
        end_with(options.with_parent)
    if options.over_ssh:
        read_environment()
    words = options.module or options.words
    if words[:1] == ["--"]:  # as is the custom where options end
        words = words[1:]
    if not words:
        raise ValueError(
            "A script to start is needed. Received: none. "
            "For example: keras-dist run -np 2 script.py"
        )
    place, named, source = _find_place(options), options.hosts, ""
    if (file := options.hostfile) is not None:
        named, source = read_hostfile(file), f"--hostfile {file}"
    hosts = {} if named is None else parse_hosts(named, options.np, source=source)
    count = sum(hosts.values()) if hosts else options.np
    if count is None:
        count = num_gpus() or (1 if place else 0)
    if count < 1 or options.restarts < 0:
        raise ValueError(
            "At least one rank is needed, by -np N, -H or a GPU of this host, and no "
            f"negative number of restarts. Received: {count} ranks, --restarts "
            f"{options.restarts}. For example: keras-dist run -np 2 script.py"
        )
    command = _make_command(words, options)
    if not all(is_here(host) for host in hosts):
        passed_on = ["--restarts", str(options.restarts)]
        passed_on += ["--log-dir", options.log_dir] if options.log_dir else []
        passed_on += ["-m"] if options.module else ["--"]
        return run_by_ssh(hosts, [*passed_on, *words], options.rdzv)
    secret = _read_secret() if place else secrets.token_hex(16)
    place = place or Place(_NAME, 0, 1, address=LOOPBACK)
    return run_job(
        command,
        place,
        count,
        secret,
        restarts=options.restarts,
        over_ssh=options.over_ssh,
    )


def _find_place(options: argparse.Namespace) -> Place | None:
    """Return the place of this host among hosts with the same command."""
    given = options.nnodes, options.node_rank, options.rdzv
    is_named = options.hosts is not None or options.hostfile is not None
    if is_named and given[:2] == (None, None):
        return None  # by ssh
    if not is_named and given == (None, None, None):
        is_inner = options.with_parent is not None or "HOROVOD_RANK" in os.environ
        place = None if is_inner else find_place()
        if place is None or place.launcher == IndexedJob.name:
            return place
        raise ValueError(
            f"{place.launcher} has started this command as one of several ranks, and "
            "each would start ranks for all of the data. Received: rank "
            f"{place.rank} of {place.size} from {', '.join(place.variables)}. Let "
            f"{place.launcher} start the script, without `keras-dist run`; or start "
            "this command once on each host, with `--nnodes`, `--node-rank` and "
            "`--rdzv`."
        )
    if not is_named and None not in given:
        address, port = parse_endpoint(options.rdzv)
        return Place(
            _NAME,
            options.node_rank,
            options.nnodes,
            address=address,
            port=port,
            variables=("--nnodes", "--node-rank", "--rdzv"),
        )
    raise ValueError(
        "The same command on each host needs `--nnodes`, `--node-rank` and `--rdzv`, "
        "and no `-H`, which starts it by ssh. Received: "
        f"--nnodes {options.nnodes} --node-rank {options.node_rank} --rdzv "
        f"{options.rdzv} -H {options.hosts}. For example: --nnodes 2 --node-rank 0 "
        "--rdzv a:29400"
    )


def _read_secret() -> str:
    """Return the secret of the job, which nobody else on its hosts may guess."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _SHORTEST_SECRET:
        received = f"{len(secret)} characters" if secret else "none"
        raise ValueError(
            "A job with `--rdzv` needs a secret of at least "
            f"{_SHORTEST_SECRET} characters. Received: {received}. Set {SECRET} to "
            "the same value on all hosts, as from `openssl rand -hex 16`."
        )
    return secret


def _make_command(words: Sequence[str], options: argparse.Namespace) -> Command:
    """Return the command of the ranks, and set the variables that options stand for."""
    kind, words = ("module", words) if options.module else parse_command(words)
    set_stall(options.stall_limit)
    if options.distribute:
        if kind == "program":
            raise ValueError(
                "`--distribute` is for a script of Python, or `-m module`. "
                f"Received: {' '.join(words)}"
            )
        os.environ[DISTRIBUTE] = os.environ.get(DISTRIBUTE) or _BATCH
    return Command(kind, words, options.log_dir)
