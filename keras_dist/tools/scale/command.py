"""The command `keras-dist scale`."""

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_dist.launch.options import add_hosts, add_limits
from keras_dist.report import check_installed, json_text, write_whole
from keras_dist.report.study import Study
from keras_dist.report.training import FORMAT
from keras_dist.tools.scale.folder import Folder, facts_of, forget
from keras_dist.tools.scale.price import Price, price_of
from keras_dist.tools.scale.results import results_of
from keras_dist.tools.scale.runs import Launch
from keras_dist.tools.scale.scale_page import scale_page
from keras_dist.tools.scale.screen import Screen
from keras_dist.version import __version__


def add_scale(commands: argparse._SubParsersAction) -> None:
    """Add the command `scale` to those of `keras-dist`."""
    command = commands.add_parser(
        "scale",
        help="run a script on 1, 2, 4 … ranks, and show how far it scales",
        description=(
            "Run a script that calls `dist_fit`, unchanged, on several numbers of "
            "ranks in turn, and write a page and a JSON: rows per second, efficiency, "
            "time to an accuracy, where the time goes, learning curves, memory, cost, "
            "and what limits. The same command goes on where it was interrupted."
        ),
        usage="%(prog)s -np N,N… [options] script.py [arguments]\n"
        "       %(prog)s script.py -np N,N… [options] [-- arguments]",
    )
    _add_options(command)
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_scale)


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-np", type=_counts, metavar="N,N…", help="numbers of ranks, as in 1,2,4"
    )
    command.add_argument(
        "--repeats",
        type=_positive,
        default=1,
        metavar="R",
        help="runs of each number of ranks (default: 1)",
    )
    command.add_argument(
        "--epochs", type=_positive, metavar="E", help="in place of the script's own"
    )
    command.add_argument(
        "--output",
        type=Path,
        default=Path("scale.html"),
        metavar="FILE",
        help="the page, with a JSON and a folder of the runs beside it, or the JSON "
        "alone (default: scale.html)",
    )
    command.add_argument(
        "--new", action="store_true", help="forget runs of an earlier study there"
    )
    _add_comparison(command)
    add_hosts(command)
    add_limits(command)


def _add_comparison(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target-accuracy",
        type=float,
        metavar="A",
        help="stop each run when the accuracy has reached A, and compare the times",
    )
    command.add_argument(
        "--metric",
        metavar="NAME",
        help="the metric of the logs to compare by (default: the accuracy on "
        "validation data, or on training data, or else the loss)",
    )
    command.add_argument(
        "--price",
        metavar="P/hour",
        help="what an hour of a rank costs, as $2.5/hour, or of a host: 10/hour/host",
    )


def _counts(text: str) -> list[int]:
    return sorted({_positive(word) for word in text.split(",")})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"Whole numbers from 1 on are needed, as in -np 1,2,4. Received: {text!r}"
        )
    return int(text)


def with_words(options: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the script with its arguments, in both orders of the usage.

    Args:
        options: Parsed up to the script.

    Raises:
        ValueError: If the script or the numbers of ranks are missing.
    """
    words = options.words[1:] if options.words[:1] == ["--"] else [*options.words]
    if words and options.np is None:  # our options are behind the script
        script, rest = words[0], words[1:]
        at = rest.index("--") if "--" in rest else len(rest)
        parser = argparse.ArgumentParser(prog="keras-dist scale", allow_abbrev=False)
        _add_options(parser)
        options = parser.parse_args(rest[:at], argparse.Namespace(**vars(options)))
        words = [script, *rest[at + 1 :]]
    if not words or options.np is None:
        raise ValueError(
            "A script and numbers of ranks are needed. Received: "
            f"{shlex.join(words) or 'no script'}, -np {options.np}. "
            "For example: keras-dist scale -np 1,2,4 script.py"
        )
    if not (words[0].endswith(".py") and Path(words[0]).is_file()):
        raise ValueError(f"There is no such script. Received: {words[0]}")
    if options.output.suffix not in (".html", ".json"):
        raise ValueError(
            "The output is a file that ends with .html or .json. Received: --output "
            f"{options.output}"
        )
    return options, words


def _scale(options: argparse.Namespace) -> int:
    options, words = with_words(options)
    price = None if options.price is None else price_of(options.price)
    if options.output.suffix == ".html":
        check_installed()
    where = where_words(options)
    settings = {
        "epochs": options.epochs,
        "target": options.target_accuracy,
        "metric": options.metric,
        "options": where,
        "version": __version__,
    }
    facts = facts_of(words, **settings)
    path = options.output.with_suffix(".runs")
    if options.new:
        forget(path)
    folder = Folder(path, facts)
    study = Study("", options.epochs, options.target_accuracy, options.metric)
    launch = Launch(words, where, study)
    screen = Screen()
    screen.title(shlex.join(["keras-dist", *sys.argv[1:]]))
    runs: list[dict[str, Any]] = []
    planned = [(n, k + 1) for k in range(options.repeats) for n in options.np]
    for ranks, repeat in planned:
        name = screen.name(ranks, repeat, options.repeats)
        known = folder.outcome(ranks, repeat)
        if known is not None and known["state"] == "finished":
            screen.done(name, known)
        else:
            show = screen.progress(name, len(runs), len(planned))
            known = launch.run(folder, ranks, repeat, show)
            screen.done(name, known, log=folder.log_path(ranks, repeat))
        runs.append(known)
        content = _content(options, words, price, runs, len(planned))
        _write(options.output, content)
    screen.summary(content, options.output)
    return 0 if all(run["state"] == "finished" for run in runs) else 1


def where_words(options: argparse.Namespace) -> list[str]:
    """The options of `keras-dist run` that were given, but for `-np`."""
    known = argparse.ArgumentParser(add_help=False)
    add_hosts(known)
    add_limits(known)
    given, words = vars(options), []
    for action in known._actions:
        value = given[action.dest]
        if value == action.default:
            continue
        words.append(action.option_strings[0])
        words += [] if action.nargs == 0 else [str(value)]
    return words


def _content(
    options: argparse.Namespace,
    words: Sequence[str],
    price: Price | None,
    runs: Sequence[dict[str, Any]],
    planned: int,
) -> dict[str, Any]:
    now = datetime.datetime.now().astimezone()
    return {
        "format": FORMAT,
        "kind": "scale",
        "version": __version__,
        "written": now.isoformat(" ", "seconds"),
        "script": Path(words[0]).name,
        "command": shlex.join(["keras-dist", *sys.argv[1:]]),
        "arguments": list(words[1:]),
        "epochs": options.epochs,
        "repeats": options.repeats,
        "price": None if price is None else {**vars(price), "text": str(price)},
        "is_whole": len(runs) == planned,
        "planned": planned,
        **results_of(
            runs, target=options.target_accuracy, metric=options.metric, price=price
        ),
        "runs": list(runs),
    }


def _write(output: Path, content: dict[str, Any]) -> None:
    write_whole(output.with_suffix(".json"), json_text(content))
    if output.suffix == ".html":
        write_whole(output, scale_page(content))
