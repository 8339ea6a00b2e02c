"""The commands `keras-dist check` and `keras-dist env`."""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_dist.clusters import find_place
from keras_dist.launch.command import add_where
from keras_dist.launch.hosts import num_gpus
from keras_dist.tools.check.host import Result, check_host, parse_line
from keras_dist.version import __version__

# The checks of `ranks`, which is not imported here: it needs TensorFlow.
RANK_CHECKS = ("connect", "alike", "devices", "sums", "training")

_SIGNS = {"ok": "✔", "failed": "✘", "warning": "!"}


def add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands `check` and `env` to `keras-dist`."""
    check = commands.add_parser(
        "check",
        help="test whether these machines are ready to train",
        description=(
            "Check the installation, start ranks as `run` does, and check their "
            "devices, sums and a small training. Each check prints its result, and "
            "what to do if it failed. The exit code is 0 if none failed."
        ),
    )
    add_where(check)
    check.set_defaults(run=lambda options: _run(options, run_words(options)))
    env = commands.add_parser(
        "env",
        help="print versions, system and network, for a bug report",
        description="Print the first lines of `keras-dist check`, without ranks.",
    )
    env.set_defaults(run=lambda options: _run(options, None))
    for command in (check, env):
        command.add_argument(
            "--json", metavar="FILE", help="also write all results to this file"
        )


def run_words(options: argparse.Namespace) -> list[str]:
    """Return the options of `keras-dist run` that were given to `check`."""
    known = argparse.ArgumentParser(add_help=False)
    add_where(known)
    words = []
    for action in known._actions:
        value = getattr(options, action.dest)
        if value != action.default:
            words.append(action.option_strings[0])
            words += [] if action.nargs == 0 else [str(value)]
    if not words and find_place() is None:
        words = ["-np", str(num_gpus() or 2)]
    return words


def _run(options: argparse.Namespace, words: Sequence[str] | None) -> int:
    """Run the checks of this host, and of ranks unless `words` is `None`."""
    results = list[Result]()

    def show(checks: Iterator[Result]) -> bool:
        for result in checks:
            results.append(result)
            print(f"  {_SIGNS[result.status]} {result.name:<9} {result.seen}")
            if result.cure:
                print(f"{' ' * 14}→ {result.cure}")
            sys.stdout.flush()
        return all(each.status != "failed" for each in results)

    has_passed = show(check_host())
    if has_passed and words is not None:
        has_passed = show(check_ranks(words))
    counts = collections.Counter(result.status for result in results)
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    if options.json:
        content = {"keras_dist": __version__, "passed": has_passed}
        content |= {"results": [vars(each) for each in results]}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0 if has_passed else 1


def check_ranks(words: Sequence[str]) -> Iterator[Result]:
    """Start the ranks, and yield what they report, each check once.

    If they end before the last check, the one that was running has failed.

    Args:
        words: Options of `keras-dist run`.
    """
    run = [sys.executable, "-m", "keras_dist", "run", *words]
    left = list(RANK_CHECKS)
    with subprocess.Popen(
        [*run, "-m", "keras_dist.tools.check.ranks"],
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = parse_line(line)
            if result is None:
                sys.stderr.write(line)
            elif result.name in left:
                left.remove(result.name)
                yield result
    if left:
        seen = f"the ranks ended with exit code {process.returncode}: see above"
        cure = "docs/troubleshooting.md explains the messages, and what to do."
        yield Result(left[0], "failed", seen, cure)
