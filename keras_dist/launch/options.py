"""The options of `keras-dist run`."""

import argparse

from keras_dist.launch.assignment import SECRET
from keras_dist.launch.elastic import RESTARTS
from keras_dist.launch.meeting import TIMEOUT_SECONDS
from keras_dist.launch.transports import TRANSPORTS

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
    add_meeting(command)
    command.add_argument(
        "--tls",
        action="store_true",
        help="between hosts, encrypt what goes to the job's store and comes from it; "
        "what the ranks send each other is not encrypted",
    )


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


def add_meeting(command: argparse.ArgumentParser) -> None:
    """Options for hosts that meet."""
    command.add_argument(
        "--nnodes",
        metavar="N",
        help="so many hosts, with this command started on each; -np is then the ranks "
        "of this one (default: one for each GPU, or 1). As MIN:MAX, hosts may be lost, "
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


def add_spare(command: argparse.ArgumentParser) -> None:
    """The option for processes that wait for the next start."""
    command.add_argument(
        "--spare",
        action="store_true",
        help="keep a process for each rank that has imported TensorFlow, so that a "
        "start after a failure is quicker; with -np, --rdzv and SLURM",
    )


def add_transport(command: argparse.ArgumentParser) -> None:
    """The option that says how ranks exchange tensors."""
    command.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="what carries tensors (default: auto: NCCL between GPUs, and MPI between "
        "ranks of one machine with a core for each, where Horovod was built with them; "
        "else Gloo)",
    )


def add_limits(command: argparse.ArgumentParser) -> None:
    """Options for restarts and limits."""
    command.add_argument(
        "--requeue",
        action="store_true",
        help="under SLURM: start the job again when SIGTERM or SIGUSR1 has ended it, "
        "and all ranks have saved",
    )
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
