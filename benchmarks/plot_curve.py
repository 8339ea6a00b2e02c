"""The curves of `make curve`, on light and on dark pages; Matplotlib: .bench/plot."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
# The color of lines and text on each kind of page.
INK = {"light": "#24292f", "dark": "#e6edf3"}
TITLES = {
    "ours": ("keras_dist", "ranks"),
    "ddp": ("PyTorch DDP", "processes"),
    "horovod": ("Horovod's optimizer on Keras 3", "rank"),
}


def draw(measured: dict, theme: str) -> None:
    """A panel for each system, a line for each number of processes, or rank."""
    ink = INK[theme]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor")
    colors = dict.fromkeys((*names, "xtick.color", "ytick.color"), ink)
    settings = {**colors, "svg.hashsalt": "curve", "font.size": 11}
    with mpl.rc_context(settings):
        figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), sharey=True)
        for axis, (name, (title, counted)) in zip(axes, TITLES.items(), strict=True):
            lines = measured[name]
            for index, (number, losses) in enumerate(lines.items()):
                label = number
                color = mpl.colormaps["turbo"](0.08 + 0.84 * index / (len(lines) - 1))
                # Lines that lie on one another: each shows where the others have gaps.
                gaps = (3 * index, (3, 3 * (len(lines) - 1)))
                style = gaps if name == "ours" else "solid"
                epochs = range(1, len(losses) + 1)
                axis.plot(epochs, losses, linestyle=style, lw=2, color=color)
                axis.plot([], [], lw=2, color=color, label=label)
            axis.set_title(title)
            axis.set_xlabel("epoch")
            axis.spines[["top", "right"]].set_visible(False)
            columns = 1 + len(lines) // 6
            axis.legend(frameon=False, title=counted, labelspacing=0.3, ncols=columns)
        axes[0].set_ylabel("validation loss")
        figure.tight_layout()
        path = DOCS / f"curve-{theme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    for each in INK:
        draw(found, each)
