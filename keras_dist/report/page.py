"""Pages of HTML in one file: sections of text, charts for Vega-Lite, and tables.

`page.html` is the template. Colors in charts are variables of its style sheet, so that
one chart is right in the light and in the dark color scheme, and changes with it.
"""

import functools
import hashlib
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_dist.report.training import PHASES

Spec = dict[str, Any]
Values = Sequence[Mapping[str, Any]]

# Packages of the extra `report`, by the names of their modules.
_PACKAGES = {"vl_convert": "vl-convert-python", "jinja2": "jinja2"}

# A process of its own, since the module brings V8, which needs 160 MB. It makes one
# file of Vega, Vega-Lite and vega-embed, in 3 s.
_BUNDLE = "import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle())"
_BUNDLE_SECONDS = 120

# Eight colors for categories, of the style sheet.
COLORS = [f"var(--c{number})" for number in range(1, 9)]

_LAYOUT: Spec = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
    "height": 220,
    "autosize": {"type": "fit-x", "contains": "padding"},
    "config": {
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
    },
}


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        head: Titles of the columns.
        rows: Cells, as text.
        is_long: Whether it is closed until the reader opens it.
        title: Title of a closed table.
        has_remarks: Whether the last column has sentences, which take several lines.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_long: bool = False
    title: str = ""
    has_remarks: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart with its title.

    Args:
        title: Title of the chart.
        spec: Specification, for Vega-Lite.
        note: A sentence below the title.
    """

    title: str
    spec: Spec
    note: str = ""

    @property
    def id(self) -> str:
        """The name of the element that holds the specification."""
        digest = hashlib.sha256(_script_json(self.spec).encode()).hexdigest()
        return f"chart-{digest[:12]}"


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Args:
        title: Title; "" for none.
        words: Paragraphs; items of a list begin with "- ".
        charts: Charts, beside each other where the window is wide enough.
        tables: Tables.
        code: Text in which each character has the same width.
    """

    title: str
    words: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str = ""


def page(
    title: str,
    subtitle: str,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    data: Mapping[str, Any],
) -> str:
    """Return a page as HTML.

    Args:
        title: Title of the page.
        subtitle: The line below the title.
        tiles: The numbers to see first, each with its name.
        sections: The sections below them.
        data: All numbers, which the page contains as JSON.

    Raises:
        ImportError: If a package of the extra `report` is not installed.
        RuntimeError: If the package cannot be used.
    """
    check_installed()
    return _template().render(
        title=title,
        subtitle=subtitle,
        tiles=tiles,
        sections=sections,
        data=data,
        javascript=javascript(),
    )


@functools.cache
def _template() -> Any:
    jinja2 = importlib.import_module("jinja2")  # an extra, which few ranks need
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    markup = importlib.import_module("markupsafe").Markup
    environment.filters["script_json"] = lambda content: markup(_script_json(content))
    return environment.get_template("page.html")


def _script_json(content: Any) -> str:
    """Return JSON for a `script` element, whose end it must not contain."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def check_installed() -> None:
    """Raise if a page cannot be made here.

    Raises:
        ImportError: If a package of the extra `report` is not installed.
    """
    missing = [
        package
        for module, package in _PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ImportError(
            "A page with charts needs jinja2 and vl-convert-python. Received: an "
            f"environment without {' and '.join(missing)}. Run: pip install "
            "'keras-dist[report]'; or name a file that ends with .json, for the "
            "numbers without a page."
        )


@functools.cache
def javascript() -> str:
    """Return Vega-Lite, which draws the charts in the browser, for a `script` element.

    Raises:
        RuntimeError: If vl-convert-python cannot be used.
    """
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", _BUNDLE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_BUNDLE_SECONDS,
        text=True,
        encoding="utf-8",
    )
    if done.returncode or not done.stdout:
        raise RuntimeError(
            "vl-convert-python gives no JavaScript for a page with charts. Received: "
            f"exit code {done.returncode}: {done.stderr.strip()[-500:]} "
            "Run: pip install --force-reinstall 'keras-dist[report]'"
        )
    # The text of a `script` element must not contain its end.
    return done.stdout.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def number(name: str, title: str, *, form: str = "", zero: bool = False) -> Spec:
    """Return an axis of numbers.

    Args:
        name: The field of the values.
        title: Title of the axis, with the unit.
        form: Format of the numbers, in d3's notation.
        zero: Whether the axis begins at 0.
    """
    axis = {"format": form} if form else {}
    if form.endswith("s"):  # d3 writes the zero with the others' prefix: 0k
        axis["labelExpr"] = "datum.value ? datum.label : '0'"
    scale = {"zero": zero, "nice": True}
    channel = {"field": name, "type": "quantitative", "title": title}
    return channel | {"scale": scale} | ({"axis": axis} if axis else {})


def whole(name: str) -> Spec:
    """Return an axis of whole numbers, as of epochs."""
    return number(name, name) | {"axis": {"format": "d", "tickMinStep": 1}}


def category(name: str) -> Spec:
    """Return an axis of categories, in their own order."""
    channel: Spec = {"field": name, "type": "ordinal", "title": name}
    return channel | {"axis": {"labelAngle": 0}, "sort": None}


def color(
    name: str, title: str | None = None, colors: Mapping[Any, str] | None = None
) -> Spec:
    """Return colors by a field, with a legend.

    Args:
        name: The field of the values.
        title: Title of the legend.
        colors: The color of each value; by default in their order.
    """
    channel: Spec = {"field": name, "type": "nominal", "title": title, "sort": None}
    if colors:
        channel["scale"] = {"domain": list(colors), "range": list(colors.values())}
    return channel


def phases_color() -> Spec:
    """Return the colors of the phases of a step, the same in all charts."""
    return color("phase", None, dict(zip(PHASES, COLORS, strict=False)))


def tips(**lines: str | tuple[str, str]) -> list[Spec]:
    """Return the lines of a tooltip.

    Args:
        **lines: For each field its title, with a format where it is a number.
    """
    found: list[Spec] = []
    for name, line in lines.items():
        title, form = (line, "") if isinstance(line, str) else line
        kind = {"type": "quantitative", "format": form} if form else {"type": "nominal"}
        found.append({"field": name, "title": title, **kind})
    return found


def lines(
    values: Values,
    x: Spec,
    y: Spec,
    *,
    by: Spec | None = None,
    detail: str = "",
    tooltip: Sequence[Spec] = (),
) -> Spec:
    """Return a chart of lines with points.

    Args:
        values: The numbers.
        x, y: The axes.
        by: Colors, a line for each.
        detail: A field with a line for each value, of the same color.
        tooltip: Lines of the tooltip.
    """
    encoding = {"x": x, "y": y, "tooltip": list(tooltip)}
    if by is not None:
        encoding["color"] = by
    if detail:
        encoding["detail"] = {"field": detail, "type": "nominal"}
    fixed = {} if by is not None else {"color": COLORS[0]}
    # A single epoch has no line, and many epochs need no points.
    point = {"size": 30 if len(values) < 200 else 0, **fixed}
    mark = {"type": "line", "point": point, **fixed}
    return layered([{"mark": mark, "encoding": encoding}], values)


def bars(
    values: Values,
    x: Spec,
    y: Spec,
    *,
    by: Spec | None = None,
    tooltip: Sequence[Spec] = (),
) -> Spec:
    """Return a chart of bars; with colors, each is a stack of the categories."""
    encoding = {"x": x, "y": y, "tooltip": list(tooltip)}
    if by is not None:
        encoding["color"] = by
        encoding["order"] = {"field": "order", "type": "quantitative"}
    fixed = {} if by is not None else {"color": COLORS[0]}
    mark = {"type": "bar", "width": {"band": 0.7}, **fixed}
    return layered([{"mark": mark, "encoding": encoding}], values)


def layered(layers: Sequence[Spec], values: Values | None = None) -> Spec:
    """Return a chart of several layers, one over the other."""
    data = {} if values is None else {"data": {"values": list(values)}}
    content = dict(layers[0]) if len(layers) == 1 else {"layer": list(layers)}
    return {**_LAYOUT, **data, **content}
