"""The page of a study, from its JSON."""

from collections.abc import Mapping
from typing import Any

from keras_dist.report.numbers import counted, percent, rounded, seconds, size
from keras_dist.report.page import Section, Table, page
from keras_dist.report.training import PHASES, median_rate
from keras_dist.tools.scale import scale_charts

Content = Mapping[str, Any]


def scale_page(content: Content) -> str:
    """The page as HTML.

    Args:
        content: The content of `scale.json`.
    """
    runs = content["runs"]
    failed = sum(run["state"] == "failed" for run in runs)
    state = f"{len(runs)} of {counted(content['planned'], 'run')}"
    state += f", {failed} failed" * bool(failed)
    return page(
        title=f"How far {content['script']} scales",
        subtitle=(
            f"{content['command']} · {state} · {content['written']} · "
            f"keras_dist {content['version']}"
        ),
        tiles=_tiles(content),
        sections=[section for section in _sections(content) if section is not None],
        data=content,
    )


def _tiles(content: Content) -> list[tuple[str, str]]:
    rows = content["by_ranks"]
    if not rows:
        return [("runs that have finished", "0")]
    first, last = rows[0], rows[-1]
    tiles = [
        (f"rows/s on {counted(row['ranks'], 'rank')}", _median(row["rows_per_second"]))
        for row in dict.fromkeys((0, len(rows) - 1))
        for row in [rows[row]]
    ]
    if last is not first:
        factor = last["efficiency"]["median"] * last["ranks"] / first["ranks"]
        tiles += [
            (f"times as fast on {counted(last['ranks'], 'rank')}", rounded(factor, 3)),
            ("efficiency", percent(last["efficiency"]["median"])),
        ]
    for row in rows:
        hit = (row["to_target"] or {}).get("seconds")
        if hit is not None:
            name = f"to {content['target']:g} on {counted(row['ranks'], 'rank')}"
            tiles.append((name, seconds(hit["median"])))
    return tiles


def _median(spread: Mapping[str, float] | None) -> str:
    return rounded(spread["median"] if spread is not None else None)


def _sections(content: Content) -> list[Section | None]:
    return [
        _limits(content),
        Section("Speed", charts=scale_charts.speed(content), tables=[_speed(content)])
        if content["by_ranks"]
        else None,
        _prediction(content),
        _learning(content),
        _phases(content),
        Section("Runs", tables=[_runs(content)]),
    ]


def _limits(content: Content) -> Section:
    words = list(content["limits"])
    for run in content["runs"]:
        if run["state"] == "failed":
            ranks = counted(run["ranks"], "rank")
            words.append(f"Run {run['repeat']} on {ranks} failed: {run['cause']}.")
    if not content["is_whole"]:
        words.append("The study is not over: the same command goes on with it.")
    return Section("What limits", words)


def _speed(content: Content) -> Table:
    head = ["ranks", "hosts", "runs", "rows/s", "lowest", "highest", "efficiency"]
    head += ["lowest", "highest", "best " + str(content["metric"])]
    rows = []
    for row in content["by_ranks"]:
        rate, efficiency = row["rows_per_second"], row["efficiency"]
        cells = [str(row["ranks"]), str(row["hosts"]), str(row["runs"])]
        cells += [rounded(rate[key]) for key in ("median", "low", "high")]
        cells += [percent(efficiency[key]) for key in ("median", "low", "high")]
        rows.append([*cells, _median(row["best"])])
    return Table(head, rows)


def _prediction(content: Content) -> Section | None:
    prediction = content["prediction"]
    if prediction is None:
        return None
    rows = [
        [
            str(point["ranks"]),
            *(rounded(point["rows_per_second"][key]) for key in ("low", "high")),
            *(percent(point["efficiency"][key]) for key in ("low", "high")),
        ]
        for point in prediction["points"]
    ]
    head = ["ranks", "rows/s from", "to", "efficiency from", "to"]
    words = ["This was not measured. It holds as far as these assumptions do:"]
    words += [f"- {text}" for text in prediction["assumptions"]]
    return Section("Prediction for more ranks", words, tables=[Table(head, rows)])


def _learning(content: Content) -> Section | None:
    if content["metric"] is None or not content["by_ranks"]:
        return None
    counts = list(dict.fromkeys(row["ranks"] for row in content["time_to"]))
    levels = list(dict.fromkeys(row["level"] for row in content["time_to"]))
    found = {(row["ranks"], row["level"]): row for row in content["time_to"]}
    head = [content["metric"]]
    for name in ("seconds", "rows"):
        head += [f"{name} on {counted(count, 'rank')}" for count in counts]
    rows = [
        [
            rounded(level),
            *(_median(found[count, level]["seconds"]) for count in counts),
            *(_median(found[count, level]["rows"]) for count in counts),
        ]
        for level in levels
    ]
    table = Table(head, rows)
    charts = scale_charts.learning(content)
    return Section("Learning", _targets(content), charts, [table])


def _targets(content: Content) -> list[str]:
    words = [f"Compared by {content['metric']}."]
    if content["target"] is None:
        return words
    for row in content["by_ranks"]:
        hit, ranks = row["to_target"], counted(row["ranks"], "rank")
        if hit is None or hit["seconds"] is None:
            words.append(f"- {ranks}: {content['target']:g} was not reached.")
            continue
        after, rows = seconds(hit["seconds"]["median"]), _median(hit["rows"])
        words.append(
            f"- {ranks}: {content['target']:g} after {after}, {rows} rows, epoch "
            f"{_median(hit['epochs'])}; {hit['reached']} of "
            f"{counted(row['runs'], 'run')}."
        )
    return words


def _phases(content: Content) -> Section | None:
    rows = []
    for row in content["by_ranks"]:
        step = row["step"] or {"others": 0.0, "averaging": 0.0}
        cells = [
            str(row["ranks"]),
            *(percent(row["phases"][phase]) for phase in PHASES),
        ]
        cells += [f"{1000 * (step['others'] + step['averaging']):.1f} ms"]
        cells += [percent(row["outside"]), seconds(row["first"]), size(row["memory"])]
        cost = row["cost"] or {"run": None, "to_target": None}
        rows.append([*cells, *(rounded(cost[key], 3) for key in ("run", "to_target"))])
    if not rows:
        return None
    head = ["ranks", *PHASES, "a step", "validation, callbacks", "first step", "memory"]
    head += ["cost of a run", "to the target"]
    charts = scale_charts.phases(content)
    return Section("Where the time goes", charts=charts, tables=[Table(head, rows)])


def _runs(content: Content) -> Table:
    head = ["ranks", "run", "state", "rows/s", "epochs", "seconds", "remark"]
    rows = []
    for run in content["runs"]:
        epochs = run["training"]["epochs"] if run["training"] is not None else []
        cells = [str(run["ranks"]), str(run["repeat"]), run["state"]]
        cells += [rounded(median_rate(epochs)), str(len(epochs))]
        rows.append([*cells, seconds(run["seconds"]), run["cause"]])
    return Table(head, rows, has_remarks=True)
