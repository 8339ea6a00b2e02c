"""The module that the ranks of a stage run, all but the first stage."""

import argparse
import sys
from collections.abc import Callable, Sequence

from keras_dist.tools.check import collectives, devices, resume, speed, truth
from keras_dist.tools.check.options import add_inner

STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "devices": devices.run,
    "collectives": collectives.run,
    "truth": truth.run,
    "resume": resume.run,
    "speed": speed.run,
}


def main(words: Sequence[str]) -> None:
    """Run one stage on this rank.

    Args:
        words: The words of the command line.
    """
    parser = argparse.ArgumentParser()
    add_inner(parser)
    options = parser.parse_args(words)
    STAGES[options.stage](options)


if __name__ == "__main__":
    main(sys.argv[1:])
