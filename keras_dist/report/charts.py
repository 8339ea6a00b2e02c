"""Specifications of charts, for Vega-Lite.

Colors are variables of the page's style sheet, so that one chart is right in the light
and in the dark color scheme, and changes with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report.training import PHASES

Spec = dict[str, Any]
Values = Sequence[Mapping[str, Any]]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_HEIGHT = 220

# Of the style sheet in `page`: eight colors for categories.
COLORS = [f"var(--c{number})" for number in range(1, 9)]
_PHASE_COLORS = dict(zip(PHASES, COLORS, strict=False))

_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domainColor": "var(--line)",
        "gridColor": "var(--grid)",
        "tickColor": "var(--line)",
        "labelColor": "var(--dim)",
        "titleColor": "var(--dim)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": True,
        "tickCount": 5,
    },
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "labelColor": "var(--ink)",
        "titleColor": "var(--dim)",
        "labelFontSize": 11.5,
        "labelOffset": 3,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "symbolStrokeWidth": 3,
        "columns": 4,
        "columnPadding": 7,
        "symbolSize": 70,
    },
    "point": {"size": 36, "filled": True},
    "line": {"strokeWidth": 2},
    "rule": {"stroke": "var(--dim)"},
    "text": {"fill": "var(--ink)", "fontSize": 12},
    "range": {"category": COLORS},
}


def number(name: str, title: str, *, form: str = "", zero: bool = False) -> Spec:
    """An axis of numbers.

    Args:
        name: The field of the values.
        title: The title of the axis, with the unit.
        form: Format of the numbers, as of d3.
        zero: Whether the axis begins at 0.
    """
    axis = {"format": form} if form else {}
    if form.endswith("s"):  # d3 writes the zero with the others' prefix: 0k
        axis["labelExpr"] = "datum.value ? datum.label : '0'"
    scale = {"zero": zero, "nice": True}
    channel = {"field": name, "type": "quantitative", "title": title}
    return channel | {"scale": scale} | ({"axis": axis} if axis else {})


def whole(name: str, title: str) -> Spec:
    """An axis of whole numbers, as of epochs."""
    channel = number(name, title, form="d")
    return channel | {"axis": {"format": "d", "tickMinStep": 1}}


def category(name: str, title: str, order: Sequence[Any] | None = None) -> Spec:
    """An axis of categories, in their own order."""
    channel: Spec = {"field": name, "type": "ordinal", "title": title}
    channel["axis"] = {"labelAngle": 0}
    return channel | {"sort": list(order) if order else None}


def color(
    name: str,
    title: str | None = None,
    colors: Mapping[Any, str] | None = None,
) -> Spec:
    """Colors by a field, with a legend.

    Args:
        name: The field of the values.
        title: Title of the legend.
        colors: The color of each value; by default in their order.
    """
    channel: Spec = {"field": name, "type": "nominal", "title": title, "sort": None}
    if colors:
        scale = {"domain": list(colors), "range": list(colors.values())}
        channel["scale"] = scale
    return channel


def phases_color() -> Spec:
    """Colors of the phases of a step, the same in all charts."""
    return color("phase", None, _PHASE_COLORS)


def tip(name: str, title: str, form: str = "") -> Spec:
    """A line of the tooltip."""
    kind = {"type": "quantitative", "format": form} if form else {"type": "nominal"}
    return {"field": name, "title": title, **kind}


def lines(
    values: Values,
    x: Spec,
    y: Spec,
    *,
    by: Spec | None = None,
    detail: str = "",
    tips: Sequence[Spec] = (),
) -> Spec:
    """A chart of lines with points.

    Args:
        values: The numbers.
        x, y: The axes.
        by: Colors, a line for each.
        detail: A field with a line for each value, of the same color.
        tips: Lines of the tooltip.
    """
    encoding = {"x": x, "y": y, "tooltip": list(tips)}
    if by is not None:
        encoding["color"] = by
    if detail:
        encoding["detail"] = {"field": detail, "type": "nominal"}
    fixed = {} if by is not None else {"color": COLORS[0]}
    # A single epoch has no line, and many epochs need no points.
    point = {"size": 30 if len(values) < 200 else 0, **fixed}
    return chart(values, {"type": "line", "point": point, **fixed}, encoding)


def bars(
    values: Values,
    x: Spec,
    y: Spec,
    *,
    by: Spec | None = None,
    tips: Sequence[Spec] = (),
) -> Spec:
    """A chart of bars; with colors, each is a stack of the categories."""
    encoding = {"x": x, "y": y, "tooltip": list(tips)}
    if by is not None:
        encoding["color"] = by
        encoding["order"] = {"field": "order", "type": "quantitative"}
    fixed = {} if by is not None else {"color": COLORS[0]}
    return chart(values, {"type": "bar", "width": {"band": 0.7}, **fixed}, encoding)


def chart(values: Values, mark: Spec, encoding: Mapping[str, Any]) -> Spec:
    """A chart with one mark."""
    return layered([{"mark": mark, "encoding": dict(encoding)}], values)


def layered(layers: Sequence[Spec], values: Values | None = None) -> Spec:
    """A chart of several layers, one over the other."""
    data = {} if values is None else {"data": {"values": list(values)}}
    content = dict(layers[0]) if len(layers) == 1 else {"layer": list(layers)}
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": _HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": _CONFIG,
        **data,
        **content,
    }


def values_in(spec: Spec) -> list[Mapping[str, Any]]:
    """All values that a chart shows, of all its layers."""
    found = list(spec.get("data", {}).get("values", ()))
    for layer in spec.get("layer", ()):
        found += values_in(layer)
    return found
