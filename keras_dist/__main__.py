"""The command `keras-dist`, also as `python -m keras_dist`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from keras_dist.install import InstallError, install_horovod
from keras_dist.launch.command import add_run
from keras_dist.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: The arguments after the command's name; by default the process's own.
    """
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except (InstallError, OSError, RuntimeError, ValueError) as error:
        print(f"keras-dist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkeras-dist: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-dist", description="Train Keras models on many processes."
    )
    parser.add_argument(
        "--version", action="version", version=f"keras-dist {__version__}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_run(commands)
    _add_install_horovod(commands)
    _add_bench_collectives(commands)
    return parser


def _add_install_horovod(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow of this environment",
        description=(
            "Build Horovod for the TensorFlow that is installed in this environment, "
            "with Gloo, and with MPI and NCCL where they are found. Takes about two "
            "minutes on two cores."
        ),
    )
    command.add_argument(
        "--mpi",
        action=argparse.BooleanOptionalAction,
        help="with MPI; by default where Open MPI is found",
    )
    command.add_argument(
        "--nccl",
        action=argparse.BooleanOptionalAction,
        help="with NCCL; by default where NCCL and nvcc are found",
    )
    command.add_argument(
        "--if-needed",
        action="store_true",
        help="do nothing where a Horovod for exactly this TensorFlow is installed",
    )
    command.set_defaults(run=_install_horovod)


def _add_bench_collectives(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench-collectives",
        help="print how fast ranks talk, by the size of what they say",
        description=(
            "Print latency and bandwidth of a sum over all ranks, by its size. Starts "
            "ranks on this machine, once for each transport that Horovod was built "
            "with; or, started by a launcher, measures with the ranks that there are."
        ),
    )
    command.add_argument(
        "-np", type=int, default=2, metavar="N", help="ranks to start (default: 2)"
    )
    command.add_argument(
        "--repetitions",
        type=int,
        default=100,
        metavar="K",
        help="sums of each size, a tenth of it from 1 MiB on (default: 100)",
    )
    command.set_defaults(run=_bench_collectives)


def _bench_collectives(options: argparse.Namespace) -> int:
    # TensorFlow takes seconds to import, which the other commands do without.
    bench = importlib.import_module("keras_dist.tools.bench_collectives")
    return bench.run(options.np, options.repetitions)


def _install_horovod(options: argparse.Namespace) -> int:
    install_horovod(
        mpi=options.mpi, nccl=options.nccl, only_if_needed=options.if_needed
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
