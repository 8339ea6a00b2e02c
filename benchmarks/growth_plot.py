"""The plot of `make growth`; Matplotlib comes from .bench/plot."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
GIGABITS = (10, 25, 100)


def efficiency(ranks, size, seconds, *, fixed, hop, bandwidth):
    """The fraction of a step in which a rank computes; `size` in bytes."""
    sent = 2 * (ranks - 1) / ranks * size / bandwidth
    return seconds / (seconds + fixed + 2 * (ranks - 1) * hop + sent)


def plot(facts, path):
    """A panel for each network, a line for each model."""
    figure, axes = pyplot.subplots(1, len(GIGABITS), figsize=(11, 3.8), sharey=True)
    for axis, gigabits in zip(axes, GIGABITS, strict=True):
        for name, size in facts["sizes"].items():
            values = [
                efficiency(
                    ranks,
                    size,
                    facts["seconds"][name],
                    fixed=facts["fixed"],
                    hop=facts["hop"],
                    bandwidth=gigabits * 1e9 / 8,
                )
                for ranks in RANKS
            ]
            axis.plot(RANKS, values, marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(RANKS, [f"{n:,}" for n in RANKS], fontsize=8, rotation=35)
        axis.set_title(f"{gigabits} Gb/s", fontsize=10)
        axis.set_xlabel("ranks, one on each host")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the step spent computing")
    axes[0].legend(fontsize=8, loc="lower left")
    figure.suptitle(
        f"Predicted, nothing overlapped: {facts['fixed'] * 1e3:.1f} ms a collective, "
        f"{facts['hop'] * 1e6:.0f} µs a hop of the ring, the network's nominal rate",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    docs = Path(__file__).parents[1] / "docs"
    plot(json.loads(sys.argv[1]), docs / "growth.png")
