"""The command `keras-dist`, also as `python -m keras_dist`."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from keras_dist.launch.command import add_run
from keras_dist.tools.check.command import add_check
from keras_dist.tools.install import InstallError, install_horovod
from keras_dist.tools.migrate.command import add_migrate
from keras_dist.tools.scale.command import add_scale
from keras_dist.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: The arguments after the command's name; by default the process's own.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:  # with the usage of the command, which has other options
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return options.run(options)
    except (ImportError, InstallError, OSError, RuntimeError, ValueError) as error:
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
    # Without its dependencies the command still says which to install.
    with contextlib.suppress(ImportError):
        importlib.import_module("shtab").add_argument_to(parser, "--print-completion")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_run(commands)
    add_check(commands)
    add_scale(commands)
    _add_install_horovod(commands)
    _add_bench_collectives(commands)
    add_migrate(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_install_horovod(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow of this environment",
        description=(
            "Build Horovod for the TensorFlow that is installed in this environment, "
            "with Gloo, and with MPI and NCCL if they are found. Takes about two "
            "minutes on two cores; with --wheel-dir only the first time, and with "
            "--find-links never where a wheel fits."
        ),
    )
    command.add_argument(
        "--mpi",
        action=argparse.BooleanOptionalAction,
        help="build with MPI (default: if Open MPI is found)",
    )
    command.add_argument(
        "--nccl",
        action=argparse.BooleanOptionalAction,
        help="build with NCCL (default: if NCCL and nvcc are found)",
    )
    command.add_argument(
        "--if-needed",
        action="store_true",
        help="do nothing if a Horovod for this TensorFlow is installed",
    )
    command.add_argument(
        "--wheel-dir",
        metavar="DIR",
        help="take the wheel in DIR that fits, without a compiler and a network; if "
        "there is none, build it, and keep it there",
    )
    command.add_argument(
        "--find-links",
        metavar="DIR|URL",
        help="take the wheel that fits from a folder or an address with SHA256SUMS, "
        "without a compiler, after checking its sum; if there is none, build it",
    )
    command.set_defaults(run=_install_horovod)


def _add_bench_collectives(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench-collectives",
        help="measure latency and bandwidth of allreduce",
        description=(
            "Print latency and bandwidth of allreduce, by the size of the tensor. "
            "Starts ranks on this machine, once for each transport that Horovod was "
            "built with. If a launcher started this command, uses the launcher's ranks."
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
        help="repetitions of each size, a tenth of it from 1 MiB on (default: 100)",
    )
    command.set_defaults(run=_bench_collectives)


def _bench_collectives(options: argparse.Namespace) -> int:
    # Imports TensorFlow, which takes seconds and which no other command needs.
    bench = importlib.import_module("keras_dist.tools.bench")
    return bench.run(options.np, options.repetitions)


def _install_horovod(options: argparse.Namespace) -> int:
    install_horovod(
        mpi=options.mpi,
        nccl=options.nccl,
        only_if_needed=options.if_needed,
        wheel_dir=options.wheel_dir,
        find_links=options.find_links,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
