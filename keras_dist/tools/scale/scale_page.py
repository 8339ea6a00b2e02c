"""The page of a study, from its JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_dist.report.page import (
    COLORS,
    Chart,
    Section,
    Spec,
    Table,
    bars,
    category,
    color,
    layered,
    lines,
    number,
    page,
    phases_color,
    tips,
)
from keras_dist.report.training import (
    PHASES,
    counted,
    median_rate,
    numbers_in,
    percent,
    rounded,
    seconds,
    size,
)

Content = Mapping[str, Any]

_MEASURED, _IDEAL, _PREDICTED = "measured", "ideal", "predicted"
_COLORS = {_MEASURED: COLORS[0], _IDEAL: "var(--dim)", _PREDICTED: COLORS[1]}


def scale_page(content: Content) -> str:
    """Return the page as HTML.

    Args:
        content: The content of `scale.json`.

    Raises:
        ImportError: If a package of the extra `report` is not installed.
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
        sections=list(_sections(content)),
        data=content,
    )


def _tiles(content: Content) -> list[tuple[str, str]]:
    rows = content["by_ranks"]
    if not rows:
        return [("runs that have finished", "0")]
    first, last = rows[0], rows[-1]
    tiles = [
        (f"rows/s on {counted(row['ranks'], 'rank')}", _median(row["rows_per_second"]))
        for row in ([first] if last is first else [first, last])
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


def _sections(content: Content) -> Iterator[Section]:
    rows, has_metric = content["by_ranks"], content["metric"] is not None
    yield Section("What limits", _limits(content))
    if rows:
        yield Section("Speed", charts=_speed(content), tables=[_speed_table(content)])
    if content["prediction"] is not None:
        yield _prediction(content["prediction"])
    if rows and has_metric:
        tables = [_learning_table(content)]
        yield Section("Learning", _targets(content), _learning(content), tables)
    if rows:
        title, tables = "Where the time goes", [_phases_table(rows)]
        yield Section(title, charts=_phases(content), tables=tables)
    yield Section("Runs", tables=[_runs_table(content["runs"])])


def _limits(content: Content) -> list[str]:
    words = list(content["limits"])
    for run in content["runs"]:
        if run["state"] == "failed":
            ranks = counted(run["ranks"], "rank")
            words.append(f"Run {run['repeat']} on {ranks} failed: {run['cause']}.")
    if not content["is_whole"]:
        words.append("The study is not over: the same command goes on with it.")
    return words


def _speed_table(content: Content) -> Table:
    head = ["ranks", "hosts", "runs", "rows/s", "lowest", "highest", "efficiency"]
    head += ["lowest", "highest", f"best {content['metric']}"]
    rows = []
    for row in content["by_ranks"]:
        rate, efficiency = row["rows_per_second"], row["efficiency"]
        cells = [str(row["ranks"]), str(row["hosts"]), str(row["runs"])]
        cells += [rounded(rate[key]) for key in ("median", "low", "high")]
        cells += [percent(efficiency[key]) for key in ("median", "low", "high")]
        rows.append([*cells, _median(row["best"])])
    return Table(head, rows)


def _prediction(prediction: Content) -> Section:
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


def _learning_table(content: Content) -> Table:
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
    return Table(head, rows)


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


def _phases_table(by_ranks: Sequence[Content]) -> Table:
    rows = []
    for row in by_ranks:
        step = row["step"] or {"others": 0.0, "averaging": 0.0}
        cells = [
            str(row["ranks"]),
            *(percent(row["phases"][phase]) for phase in PHASES),
        ]
        cells += [f"{1000 * (step['others'] + step['averaging']):.1f} ms"]
        cells += [percent(row["outside"]), seconds(row["first"]), size(row["memory"])]
        cost = row["cost"] or {"run": None, "to_target": None}
        rows.append([*cells, *(rounded(cost[key], 3) for key in ("run", "to_target"))])
    head = ["ranks", *PHASES, "a step", "validation, callbacks", "first step", "memory"]
    return Table([*head, "cost of a run", "to the target"], rows)


def _runs_table(runs: Sequence[Content]) -> Table:
    head = ["ranks", "run", "state", "rows/s", "epochs", "seconds", "remark"]
    rows = []
    for run in runs:
        epochs = run["training"]["epochs"] if run["training"] is not None else []
        cells = [str(run["ranks"]), str(run["repeat"]), run["state"]]
        cells += [rounded(median_rate(epochs)), str(len(epochs))]
        rows.append([*cells, seconds(run["seconds"]), run["cause"]])
    return Table(head, rows, has_remarks=True)


def _speed(content: Content) -> list[Chart]:
    rows = content["by_ranks"]
    base = rows[0]["rows_per_second"]["median"] / rows[0]["ranks"]
    of = counted(rows[0]["ranks"], "rank")
    return [
        Chart(
            "Rows per second",
            _by_ranks(content, "rows_per_second", "rows/s", base, "~s"),
            "of all ranks; median, with the lowest and the highest epoch",
        ),
        Chart(
            "Efficiency",
            _by_ranks(content, "efficiency", "efficiency", None, ".0%"),
            f"rows per second of each rank, relative to {of}",
        ),
    ]


def _by_ranks(
    content: Content, name: str, title: str, base: float | None, form: str
) -> Spec:
    """Draw points with their spread, the ideal line, and two predicted ones.

    Args:
        content: The content of the page.
        name: What is shown by the number of ranks.
        title: Title of the axis.
        base: Ideal value on one rank, which grows with the ranks; `None` for 1 on any
            number of ranks.
        form: Format of the numbers.
    """
    measured = [
        {"ranks": row["ranks"], "kind": _MEASURED, "value": row[name]["median"]}
        | {key: row[name][key] for key in ("low", "high")}
        for row in content["by_ranks"]
    ]
    points = (content["prediction"] or {"points": []})["points"]
    between = [
        {"ranks": point["ranks"], "kind": _PREDICTED, "line": line}
        | {"value": point[name][line], **point[name]}
        for point in points
        for line in ("low", "high")
    ]
    counts = sorted({value["ranks"] for value in [*measured, *between]})
    ideal = [
        {"ranks": n, "kind": _IDEAL, "value": 1.0 if base is None else base * n}
        for n in counts
    ]
    axis = number("value", title, form=form, zero=True)
    if base is not None:  # the ideal line is straight on a logarithmic axis, too
        shown = [v[key] for v in [*measured, *between] for key in ("low", "high")]
        axis["scale"] = _log([*shown, *(value["value"] for value in ideal)])
    kinds = [_MEASURED, _IDEAL, *([_PREDICTED] if between else [])]
    shape = ".1%" if base is None else ",.4~g"
    shared: dict[str, Any] = {
        "x": {
            **number("ranks", "ranks"),
            "scale": _log(counts) | {"base": 2},
            "axis": {"values": counts, "format": "d"},
        },
        "y": axis,
        "color": color("kind", None, {kind: _COLORS[kind] for kind in kinds}),
        "tooltip": [
            *tips(kind="what", ranks="ranks"),
            *tips(**{key: (key, shape) for key in ("value", "low", "high")}),
        ],
    }
    spread = {"y": {**axis, "field": "low"}, "y2": {"field": "high"}}

    def layer(values: Sequence[Any], mark: Any, **more: Any) -> Spec:
        encoding = {**shared, **more}
        return {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}

    dotted = {"type": "line", "strokeDash": [2, 4]}
    layers = [layer(ideal, dotted, tooltip=shared["tooltip"][:3])]
    if between:
        once = [value for value in between if value["line"] == "low"]
        layers.append(layer(once, {"type": "area", "opacity": 0.15}, **spread))
        dashed = {"type": "line", "strokeDash": [6, 4], "point": True}
        layers.append(layer(between, dashed, detail={"field": "line"}))
    bar = {"type": "rule", "strokeWidth": 4, "opacity": 0.4}
    layers.append(layer(measured, bar, **spread))
    layers.append(layer(measured, {"type": "line", "point": {"size": 60}}))
    return layered(layers)


def _log(numbers: Sequence[float]) -> Spec:
    """Return a logarithmic scale, slightly larger than its numbers, even one alone."""
    domain = [min(numbers) / 1.15, max(numbers) * 1.15]
    return {"type": "log", "nice": False, "domain": domain}


def _learning(content: Content) -> list[Chart]:
    metric = content["metric"]
    values = [
        {"ranks": str(run["ranks"]), "run": f"{run['ranks']}-{run['repeat']}"}
        | {"seconds": epoch["seconds"], "rows": epoch["rows"], "epoch": epoch["epoch"]}
        | {"value": value}
        for run in content["runs"]
        if run["training"] is not None
        for epoch, value in zip(
            run["training"]["epochs"],
            numbers_in(run["training"]["epochs"], metric),
            strict=True,
        )
    ]
    times = [
        {
            "ranks": str(row["ranks"]),
            "level": row["level"],
            "seconds": row["seconds"]["median"],
        }
        for row in content["time_to"]
        if row["seconds"] is not None
    ]
    reached = lines(
        times,
        number("level", metric),
        number("seconds", "seconds", zero=True),
        by=color("ranks", "ranks"),
        tooltip=tips(
            ranks="ranks", level=(metric, ".4~g"), seconds=("seconds", ",.1f")
        ),
    )
    rows = content["by_ranks"]  # of an earlier version, without this
    several = [row for row in rows if row["ranks"] > 1]  # one rank shares nothing
    is_shared = bool(several) and all(row.get("is_shared") for row in several)
    by_time = Chart(
        f"{metric} over time",
        _curve(values, "seconds", metric),
        "since the first step began",
    )
    by_rows = Chart(
        f"{metric} over rows",
        _curve(values, "rows", metric),
        "all ranks share the batch: without randomness the curves lie over each other"
        if is_shared
        else "a recipe that breaks with larger global batches is lower here",
    )
    return [
        *([by_rows, by_time] if is_shared else [by_time, by_rows]),
        Chart(f"Time to each {metric}", reached, "median of the runs"),
    ]


def _curve(values: Sequence[Any], x: str, metric: str) -> Spec:
    return lines(
        values,
        number(x, x, form="~s" if x == "rows" else "", zero=True),
        number("value", metric),
        by=color("ranks", "ranks"),
        detail="run",
        tooltip=tips(
            run="ranks-run",
            epoch="epoch",
            value=(metric, ".4f"),
            seconds=("seconds", ",.1f"),
            rows=("rows", ","),
        ),
    )


def _phases(content: Content) -> list[Chart]:
    rows = content["by_ranks"]
    stack = [
        {"ranks": row["ranks"], "phase": phase, "order": order, "fraction": fraction}
        for row in rows
        for order, (phase, fraction) in enumerate(row["phases"].items())
    ]
    fractions = bars(
        stack,
        category("ranks"),
        number("fraction", "of the time", form=".0%", zero=True),
        by=phases_color(),
        tooltip=tips(ranks="ranks", phase="phase", fraction=("of the time", ".1%")),
    )
    found = [
        Chart("Where the time goes", fractions, "of all ranks, without the first step")
    ]
    for name, title in (
        ("memory", "Memory of a rank"),
        ("gpu_memory", "Memory of a GPU"),
    ):
        values = [
            {"ranks": row["ranks"], "value": row[name] / 1e9}
            for row in rows
            if row[name] is not None
        ]
        if values:
            found.append(Chart(title, _bars(values, "GB"), "the most of all ranks"))
    costs = [
        {"ranks": row["ranks"], "value": row["cost"]["to_target"] or row["cost"]["run"]}
        for row in rows
        if row["cost"] is not None
    ]
    if costs:
        note = content["price"]["text"] + "; to the target where it was reached"
        found.append(Chart("Cost of a run", _bars(costs, "cost"), note))
    return found


def _bars(values: Sequence[Any], title: str) -> Spec:
    return bars(
        values,
        category("ranks"),
        number("value", title, zero=True),
        tooltip=tips(ranks="ranks", value=(title, ",.3~g")),
    )
