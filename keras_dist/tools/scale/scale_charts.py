"""The charts of a study."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report import charts
from keras_dist.report.numbers import counted
from keras_dist.report.page import Chart
from keras_dist.report.training import numbers_in

Content = Mapping[str, Any]

_MEASURED, _IDEAL, _PREDICTED = "measured", "ideal", "predicted"
_COLORS = {
    _MEASURED: charts.COLORS[0],
    _IDEAL: "var(--dim)",
    _PREDICTED: charts.COLORS[1],
}


def speed(content: Content) -> list[Chart]:
    """Rows per second and efficiency by the number of ranks, and their prediction."""
    rows = content["by_ranks"]
    if not rows:
        return []
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
) -> charts.Spec:
    """Points with their spread, the ideal line, and two predicted ones.

    Args:
        content: The content of the page.
        name: What is shown by the number of ranks.
        title: Title of its axis.
        base: Its ideal value on one rank, which grows with the ranks; `None` for 1 on
            any number of ranks.
        form: The format of its numbers.
    """
    measured, between = _measured(content, name), _predicted_values(content, name)
    counts = sorted({value["ranks"] for value in [*measured, *between]})
    ideal = [
        {"ranks": n, "kind": _IDEAL, "value": 1.0 if base is None else base * n}
        for n in counts
    ]
    # With a number that grows with the ranks, the ideal line is straight so, too.
    numbers = [v[k] for v in [*measured, *between] for k in ("low", "high")]
    numbers += [value["value"] for value in ideal]
    scale = {} if base is None else {"scale": _log(numbers)}
    axis = charts.number("value", title, form=form, zero=True) | scale
    shared = _shared(counts, axis, [_PREDICTED] if between else [], base)
    spread = {"y": {**axis, "field": "low"}, "y2": {"field": "high"}}

    def layer(values: Sequence[Any], mark: Any, **more: Any) -> charts.Spec:
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
    return charts.layered(layers)


def _measured(content: Content, name: str) -> list[dict[str, Any]]:
    return [
        {
            "ranks": row["ranks"],
            "kind": _MEASURED,
            "value": row[name]["median"],
            "low": row[name]["low"],
            "high": row[name]["high"],
        }
        for row in content["by_ranks"]
    ]


def _predicted_values(content: Content, name: str) -> list[dict[str, Any]]:
    prediction = content["prediction"]
    return [
        {
            "ranks": point["ranks"],
            "kind": _PREDICTED,
            "line": line,
            "value": point[name][line],
            **point[name],
        }
        for point in (prediction["points"] if prediction is not None else [])
        for line in ("low", "high")
    ]


def _shared(
    counts: Sequence[int], axis: charts.Spec, more: Sequence[str], base: float | None
) -> dict[str, Any]:
    """The channels that all layers of `_by_ranks` have."""
    kinds = [_MEASURED, _IDEAL, *more]
    form = ".1%" if base is None else ",.4~g"
    tips = [charts.tip("kind", "what"), charts.tip("ranks", "ranks")]
    tips += [charts.tip(key, key, form) for key in ("value", "low", "high")]
    return {
        "x": {
            **charts.number("ranks", "ranks"),
            "scale": _log(counts) | {"base": 2},
            "axis": {"values": list(counts), "format": "d"},
        },
        "y": axis,
        "color": charts.color("kind", None, {kind: _COLORS[kind] for kind in kinds}),
        "tooltip": tips,
    }


def _log(numbers: Sequence[float]) -> charts.Spec:
    """A logarithmic scale, a little larger than what it shows, be it one point."""
    domain = [min(numbers) / 1.15, max(numbers) * 1.15]
    return {"type": "log", "nice": False, "domain": domain}


def learning(content: Content) -> list[Chart]:
    """The metric of all runs over seconds and over rows, and times to its values."""
    metric = content["metric"]
    if metric is None:
        return []
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
    found = [
        Chart(
            f"{metric} over time",
            _curve(values, "seconds", metric),
            "since the first step began",
        ),
        Chart(
            f"{metric} over rows",
            _curve(values, "rows", metric),
            "a recipe that breaks with larger global batches is lower here",
        ),
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
    return [
        *found,
        Chart(f"Time to each {metric}", _times(times, metric), "median of the runs"),
    ]


def _curve(values: Sequence[Any], x: str, metric: str) -> charts.Spec:
    form = "~s" if x == "rows" else ""
    tips = [
        charts.tip("run", "ranks-run"),
        charts.tip("epoch", "epoch"),
        charts.tip("value", metric, ".4f"),
        charts.tip("seconds", "seconds", ",.1f"),
        charts.tip("rows", "rows", ","),
    ]
    return charts.lines(
        values,
        charts.number(x, x, form=form, zero=True),
        charts.number("value", metric),
        by=charts.color("ranks", "ranks"),
        detail="run",
        tips=tips,
    )


def _times(values: Sequence[Any], metric: str) -> charts.Spec:
    return charts.lines(
        values,
        charts.number("level", metric),
        charts.number("seconds", "seconds", zero=True),
        by=charts.color("ranks", "ranks"),
        tips=[
            charts.tip("ranks", "ranks"),
            charts.tip("level", metric, ".4~g"),
            charts.tip("seconds", "seconds", ",.1f"),
        ],
    )


def phases(content: Content) -> list[Chart]:
    """Where the time of a step goes, memory and cost, by the number of ranks."""
    rows = content["by_ranks"]
    stack = [
        {"ranks": row["ranks"], "phase": phase, "order": order, "fraction": fraction}
        for row in rows
        for order, (phase, fraction) in enumerate(row["phases"].items())
    ]
    tips = [charts.tip("ranks", "ranks"), charts.tip("phase", "phase")]
    fractions = charts.bars(
        stack,
        charts.category("ranks", "ranks"),
        charts.number("fraction", "of the time", form=".0%", zero=True),
        by=charts.phases_color(),
        tips=[*tips, charts.tip("fraction", "of the time", ".1%")],
    )
    found = [
        Chart("Where the time goes", fractions, "of all ranks, without the first step")
    ]
    kinds = {"memory": "Memory of a rank", "gpu_memory": "Memory of a GPU"}
    for name, title in kinds.items():
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


def _bars(values: Sequence[Any], title: str) -> charts.Spec:
    return charts.bars(
        values,
        charts.category("ranks", "ranks"),
        charts.number("value", title, zero=True),
        tips=[charts.tip("ranks", "ranks"), charts.tip("value", title, ",.3~g")],
    )
