"""The commands `keras-dist scale` and `keras-dist page`."""

import argparse
import datetime
import importlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_dist.launch.command import add_hosts, add_limits
from keras_dist.report import (
    check_installed,
    json_text,
    training_page,
    write_whole,
)
from keras_dist.report.training import (
    FORMAT,
    Study,
    counted,
    median_rate,
    metric_in,
    percent,
    rounded,
    seconds,
)
from keras_dist.tools.launcher import given_words
from keras_dist.tools.scale.results import Price, price_of, results_of
from keras_dist.tools.scale.runs import Folder, Launch, Show, facts_of, forget
from keras_dist.tools.scale.scale_page import scale_page
from keras_dist.version import __version__

if TYPE_CHECKING:
    from keras_dist.tools.screen import Screen

_PAGES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "training": training_page,
    "scale": scale_page,
}


def add_scale(commands: argparse._SubParsersAction) -> None:
    """Add the commands `scale` and `page` to those of `keras-dist`."""
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
    page = commands.add_parser(
        "page",
        help="make a page from the JSON of a report or a study",
        description=(
            "Make the page of a training (`report=`) or of a study (`keras-dist "
            "scale`) from its JSON, which may come from a machine that cannot."
        ),
    )
    page.add_argument("file", type=Path, nargs="+", help="JSON files")
    page.set_defaults(run=_page)


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
    """Parse options and script with its arguments, in both orders of the usage.

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
    where = given_words(options, add_hosts, add_limits)
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
    runs: list[dict[str, Any]] = []
    planned = [(n, k + 1) for k in range(options.repeats) for n in options.np]
    module = importlib.import_module("keras_dist.tools.screen")  # needs `rich`
    with module.Screen() as screen:
        screen.line(shlex.join(["keras-dist", *sys.argv[1:]]))
        for ranks, repeat in planned:
            of = f", run {repeat} of {options.repeats}" if options.repeats > 1 else ""
            name = f"{counted(ranks, 'rank')}{of}:"
            run = folder.outcome(ranks, repeat)
            if run is not None and run["state"] == "finished":
                screen.line(_outcome(name, run, None))
            else:
                count = f"({len(runs) + 1} of {len(planned)})"
                show = _progress(screen, name, count)
                run = launch.run(folder, ranks, repeat, show)
                screen.line(_outcome(name, run, folder.log_path(ranks, repeat)))
            runs.append(run)
            content = _content(options, words, price, runs, len(planned))
            _write(options.output, content)
        _show_summary(screen, content, options.output)
    return 0 if all(run["state"] == "finished" for run in runs) else 1


def _progress(screen: "Screen", name: str, count: str) -> Show:
    """Return a function that shows how far a run is.

    Args:
        screen: Where to show it: on a terminal always, else when an epoch has ended.
        name: The run.
        count: Its number, and the number of all.
    """
    before = -1

    def show(training: Mapping[str, Any] | None, so_far: float) -> None:
        nonlocal before
        done = len(training["epochs"]) if training is not None else 0
        text = f"{name} {state_of(training)}, {seconds(so_far)}"
        if screen.is_terminal:
            screen.running(f"  … {text} {count}")
        elif done != before:
            screen.line(f"  {text}")
        before = done

    return show


def _outcome(name: str, run: Mapping[str, Any], log: Path | None) -> str:
    """Return the line of a run that has ended.

    Args:
        name: The run.
        run: Its outcome.
        log: The file of its output; `None` for a run of an earlier start.
    """
    if run["state"] == "finished":
        text = f"✔ {name} {state_of(run['training'])}, {seconds(run['seconds'])}"
        text += f"; {run['cause']}" * bool(run["cause"])
    else:
        text = f"✘ {name} {run['cause']}; what it printed is in {log}"
    return f"  {text}" + " (of an earlier start)" * (log is None)


def state_of(training: Mapping[str, Any] | None) -> str:
    """Say how far a training is.

    >>> state_of(None), state_of({"epochs": []})
    ('starting', 'in the first epoch')
    """
    if training is None:
        return "starting"
    epochs = training["epochs"]
    if not epochs:
        return "in the first epoch"
    texts = [f"{rounded(median_rate(epochs))} rows/s"]
    name = metric_in(list(epochs[-1]["logs"]))
    if name is not None:
        texts.append(f"{name} {rounded(epochs[-1]['logs'][name])}")
    done = f"{len(epochs)} of {counted(training['epochs_planned'], 'epoch')}"
    return f"{done}, {', '.join(texts)}"


def _show_summary(screen: "Screen", content: Mapping[str, Any], output: Path) -> None:
    """Show the speed by the number of ranks, what limits, and where the page is."""
    screen.line("")
    for row in content["by_ranks"]:
        screen.line(
            f"  {counted(row['ranks'], 'rank'):>9}: "
            f"{rounded(row['rows_per_second']['median'])} rows/s, efficiency "
            f"{percent(row['efficiency']['median'])}"
        )
    for text in content["limits"]:
        screen.line(f"  {text}")
    files = [output, output.with_suffix(".json")]
    screen.line(f"\n  {', '.join(dict.fromkeys(map(str, files)))}")


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


def _page(options: argparse.Namespace) -> int:
    check_installed()
    for path in options.file:
        content = json.loads(path.read_text(encoding="utf-8"))
        output = path.with_suffix(".html")
        write_whole(output, page_of(content))
        print(output)
    return 0


def page_of(content: Any) -> str:
    """Return the page of a JSON, as HTML.

    Raises:
        ValueError: If the JSON is not from a training or a study, or from another
            version.
    """
    is_ours = isinstance(content, dict) and content.get("kind") in _PAGES
    if not is_ours or content.get("format") != FORMAT:
        raise ValueError(
            "A page is made from the JSON of a training or of a study, as this version "
            f"of keras_dist writes it. Received: {str(content)[:80]}"
        )
    return _PAGES[content["kind"]](content)
