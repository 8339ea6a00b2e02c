"""A page of HTML, in one file: sections of words, numbers, charts and tables."""

import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist.report.charts import Spec
from keras_dist.report.javascript import javascript
from keras_dist.report.style import STYLE

_SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const spec = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
  const options = {renderer: "svg", actions: false};
  vegaEmbed(figure.querySelector("div"), spec, options).catch((error) => {
    figure.querySelector("div").textContent = String(error);
  });
}
"""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        head: The titles of its columns.
        rows: Its cells, as text.
        is_long: Whether it is closed until the reader opens it.
        title: What is on it, where it is closed.
        has_remarks: Whether its last column has sentences, which take several lines.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_long: bool = False
    title: str = ""
    has_remarks: bool = False

    def __str__(self) -> str:
        kind = ' class="remarks"' if self.has_remarks else ""
        head = "".join(f"<th>{_text(cell)}</th>" for cell in self.head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n"
            for row in self.rows
        )
        table = (
            f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead>\n'
            f"<tbody>{rows}</tbody></table></div>"
        )
        if not self.is_long:
            return table
        return f"<details><summary>{_text(self.title)}</summary>{table}</details>"


@dataclass(frozen=True)
class Chart:
    """A chart with its title.

    Args:
        title: What it shows.
        spec: Its specification.
        note: A sentence below it.
    """

    title: str
    spec: Spec
    note: str = ""

    def __str__(self) -> str:
        content = _json(self.spec)
        number = f"chart-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        note = f"<small>{_text(self.note)}</small>" if self.note else ""
        return (
            f'<figure data-chart="{number}"><figcaption>{_text(self.title)}{note}'
            "</figcaption><div></div>"
            f'<script type="application/json" id="{number}">{content}</script>'
            "</figure>"
        )


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Args:
        title: Its title; "" for none.
        words: Paragraphs; those of a list begin with "- ".
        charts: Charts, beside each other where the window is wide enough.
        tables: Tables.
        code: Text in which each character has the same width.
    """

    title: str
    words: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str = ""

    def __str__(self) -> str:
        pieces = [f"<h2>{_text(self.title)}</h2>"] if self.title else []
        pieces += _paragraphs(self.words)
        if self.charts:
            shown = "\n".join(map(str, self.charts))
            pieces.append(f'<div class="charts">{shown}</div>')
        pieces += [str(table) for table in self.tables]
        if self.code:
            pieces.append(f"<pre>{_text(self.code)}</pre>")
        return "<section>" + "\n".join(pieces) + "</section>"


def page(
    title: str,
    subtitle: str,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    data: Mapping[str, Any],
) -> str:
    """A page as HTML.

    Args:
        title: Its title.
        subtitle: The line below it.
        tiles: The numbers to see first, each with what it is.
        sections: What else is on it.
        data: All numbers, which the page contains as JSON.
    """
    shown = "".join(
        f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>"
        for name, value in tiles
    )
    body = "\n".join(map(str, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{_text(title)}</h1><p>{_text(subtitle)}</p></header>
<main>
<div class="tiles">{shown}</div>
{body}
</main>
<script type="application/json" id="data">{_json(data)}</script>
<script type="module">{javascript()}{_SCRIPT}</script>
</body>
</html>
"""


def _paragraphs(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for text in words:
        if not text.startswith("- "):
            found.append(f"<p>{_text(text)}</p>")
        elif found and found[-1].startswith("<ul>"):
            found[-1] = f"{found[-1][:-5]}<li>{_text(text[2:])}</li></ul>"
        else:
            found.append(f"<ul><li>{_text(text[2:])}</li></ul>")
    return found


def _text(text: str) -> str:
    return html.escape(text)


def _json(content: Any) -> str:
    """JSON within a `script` element, whose end it must not contain."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")
