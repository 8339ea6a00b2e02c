"""The picture of a timeline of Horovod's; Matplotlib comes from .bench/plot.

Argument: the file.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

SHOWN = 0.8  # seconds
COLORS = {"waiting for the other rank": "tab:orange", "sum over Gloo": "tab:blue"}


def bars_of(events):
    """(collective, what, begin, length) in seconds, of gradients."""
    names = {
        event["pid"]: event["args"].get("name", "")
        for event in events
        if event.get("name") == "process_name"
    }
    begun, bars = {}, []
    for event in events:
        name = names.get(event.get("pid"), "")
        if "gradients" not in name or event.get("ph") not in ("B", "E"):
            continue
        stack = begun.setdefault(name, [])
        if event["ph"] == "B":
            stack.append((event.get("name", ""), event["ts"] / 1e6))
        elif stack:
            what, begin = stack.pop()
            length = event["ts"] / 1e6 - begin
            if what.startswith("NEGOTIATE"):
                bars.append((name, "waiting for the other rank", begin, length))
            elif what.startswith("GLOO"):
                bars.append((name, "sum over Gloo", begin, length))
    return bars


def plot(bars, path):
    """The last steps, one line for each collective."""
    end = max(begin + length for *_, begin, length in bars)
    bars = [bar for bar in bars if bar[2] > end - SHOWN]
    names = sorted({name for name, *_ in bars})
    figure, axis = pyplot.subplots(figsize=(11, 1.2 + 0.45 * len(names)))
    for name, what, begin, length in bars:
        axis.barh(
            names.index(name),
            max(length, 0.0004),
            left=begin - end + SHOWN,
            color=COLORS[what],
            height=0.6,
        )
    labels = [name.removeprefix("keras_dist.") for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=8)
    axis.set_xlim(0, SHOWN)
    axis.set_xlabel("seconds; between the bars the rank computes")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()]
    axis.legend(
        patches,
        list(COLORS),
        fontsize=8,
        loc="lower right",
        ncols=2,
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    docs = Path(__file__).parents[1] / "docs"
    plot(bars_of(found), docs / "timeline.png")
