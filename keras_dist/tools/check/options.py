"""The words that the command passes to the ranks of a stage."""

import argparse
from collections.abc import Sequence


def add_inner(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the ranks of a stage."""
    parser.add_argument("stage", help=argparse.SUPPRESS)
    parser.add_argument("--checks", type=_names, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--script", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)


def inner_words(options: argparse.Namespace) -> list[str]:
    """The same from the options of `keras-dist check`.

    >>> inner_words(argparse.Namespace(script=None, resume_folder="/f", quick=True))
    ['--folder', '/f', '--quick']
    """
    words = []
    if options.script:
        words += ["--script", options.script]
    if options.resume_folder:
        words += ["--folder", options.resume_folder]
    return words + ["--quick"] * options.quick


def _names(text: str) -> Sequence[str]:
    return text.split(",")
