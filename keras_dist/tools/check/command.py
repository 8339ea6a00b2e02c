"""The commands `keras-dist check` and `keras-dist env`."""

import argparse
import collections
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_dist.clusters import find_place
from keras_dist.launch.command import add_where
from keras_dist.launch.hosts import num_gpus
from keras_dist.tools.check.host import Result, Status, check_host, parse_line
from keras_dist.version import __version__

# The checks of `ranks`, which is not imported here: it needs TensorFlow.
RANK_CHECKS = ("connect", "alike", "devices", "sums", "training")

# For each status its sign, and its name in the summary.
_STATES: dict[Status, tuple[str, str]] = {
    "ok": ("✔", "passed"),
    "failed": ("✘", "failed"),
    "warning": ("!", "to be looked at"),
    "untried": ("–", "not tried"),
}
_INDENT, _WIDEST = " " * 14, 120


def add_check(commands: argparse._SubParsersAction) -> None:
    """Add the commands `check` and `env` to those of `keras-dist`."""
    check = commands.add_parser(
        "check",
        help="test whether these machines are ready to train",
        description=(
            "Check the installation, start ranks as `run` does, and check their "
            "devices, sums and a small training. Each check prints what was seen, and "
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
            "--json", metavar="FILE", help="write all results to this file, too"
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
    """Run the checks of this host, and those of ranks unless `words` is `None`."""
    results = list[Result]()

    def show(result: Result) -> None:
        results.append(result)
        print(describe(result), flush=True)

    for result in check_host():
        show(result)
    if words is not None:
        is_ready = all(each.status != "failed" for each in results)
        for result in check_ranks(words) if is_ready else untried(RANK_CHECKS):
            show(result)
    has_passed = all(each.status != "failed" for each in results)
    print(f"\n{summarize(results)}")
    if options.json:
        content = {
            "keras_dist": __version__,
            "command": shlex.join(["keras-dist", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "passed": has_passed,
            "results": [vars(each) for each in results],
        }
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
        yield from untried(left[1:])


def untried(names: Sequence[str]) -> list[Result]:
    """Return results for checks of ranks that cannot be tried."""
    return [Result(name, "untried", "see what failed before") for name in names]


def describe(result: Result) -> str:
    """Write one result, wrapped to the width of the terminal.

    >>> print(describe(Result("devices", "ok", "GPU 0")))
      ✔ devices   GPU 0
    """
    wrapper = textwrap.TextWrapper(
        min(_WIDEST, shutil.get_terminal_size().columns),
        initial_indent=f"  {_STATES[result.status][0]} {result.name:<9} ",
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = wrapper.fill(" ".join(result.seen.split()))
    wrapper.initial_indent = f"{_INDENT}→ "
    return f"{text}\n{wrapper.fill(result.cure)}" if result.cure else text


def summarize(results: Sequence[Result]) -> str:
    """Say how many checks have passed.

    >>> summarize([Result("a", "ok", ""), Result("b", "failed", "")])
    '1 passed, 1 failed'
    """
    counts = collections.Counter(_STATES[result.status][1] for result in results)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
