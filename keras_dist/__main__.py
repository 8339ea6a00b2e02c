"""The command `keras-dist`, also as `python -m keras_dist`."""

import argparse
import io
import sys
from collections.abc import Sequence

from keras_dist.launch.command import add_run
from keras_dist.tools.check.command import add_check
from keras_dist.tools.install.recipe import install_horovod
from keras_dist.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    Args:
        argv: The arguments after the command's name; by default the process's own.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may have no UTF-8
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:  # with the usage of the command, which has other options
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
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
    add_check(commands)
    _add_install_horovod(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_install_horovod(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    command = commands.add_parser(
        "install-horovod",
        help="build Horovod for the TensorFlow of this environment",
        description=(
            "Build Horovod for the TensorFlow that is installed in this environment, "
            "with Gloo, and with MPI and NCCL if they are found, in about two minutes "
            "on two cores. --wheel-dir keeps the wheel for the next time; --find-links "
            "installs a wheel that was built elsewhere."
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
        dest="only_if_needed",
        action="store_true",
        help="do nothing if a Horovod for this TensorFlow is installed",
    )
    command.add_argument(
        "--wheel-dir",
        metavar="DIR",
        help="install a wheel from DIR that fits, without a compiler and a network; if "
        "there is none, build one, and keep it there",
    )
    command.add_argument(
        "--find-links",
        metavar="DIR|URL",
        help="install a wheel that fits from a folder or a page of links, as pip does; "
        "if there is none, build one",
    )
    command.set_defaults(run=_install_horovod)


def _install_horovod(options: argparse.Namespace) -> int:
    names = ("mpi", "nccl", "only_if_needed", "wheel_dir", "find_links")
    install_horovod(**{name: getattr(options, name) for name in names})
    return 0


if __name__ == "__main__":
    sys.exit(main())
