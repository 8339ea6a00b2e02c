"""The bar chart of `make bench`; Matplotlib comes from .bench/plot."""

import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib as mpl
import report

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402


def plot(rates: report.Rates, path: Path) -> None:
    """A panel for each model, a bar for each stack."""
    figure, axes = pyplot.subplots(1, len(rates), figsize=(11, 4.2), squeeze=False)
    for axis, (model, found) in zip(axes[0], rates.items(), strict=True):
        stacks = [stack for stack in found if stack in report.OURS | report.PEERS]
        for index, stack in enumerate(stacks):
            values = found[stack]
            color = "tab:blue" if stack in report.OURS else "tab:gray"
            median = statistics.median(values)
            above = statistics.median(found[report.ceiling_of(stack)])
            axis.bar(index, above, color="none", edgecolor="black", linestyle=":")
            axis.bar(index, median, color=color)
            fraction = report.ratio(found, stack, report.ceiling_of(stack)).median
            axis.text(
                index,
                0.98 * median,
                f"{fraction:.2f}",
                ha="center",
                va="top",
                color="white",
            )
        names = [re.sub(" (on|over|DDP)", r"\n\1", stack) for stack in stacks]
        axis.set_xticks(range(len(stacks)), names, rotation=35, ha="right", fontsize=8)
        axis.set_title(report.MODELS[model], fontsize=10)
    axes[0][0].set_ylabel("rows per second")
    figure.suptitle("Two ranks: rows per second, beside their ceiling (dotted)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text())
    plot(measured["rates"], report.DOCS / "performance.png")
