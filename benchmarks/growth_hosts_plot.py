"""The plot of `make growth-hosts`; Matplotlib comes from .bench/plot."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

SECONDS = {
    "start": "start, until all are there",
    "fail": "a rank fails, until all end",
    "lose": "a host falls silent, until all end",
    "end": "all have ended, until the command has",
}


def plot(medians, path):
    """Seconds, bytes and cores by number of hosts; a straight line is a proportion."""
    hosts = [int(number) for number in medians]
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6))
    for name, label in SECONDS.items():
        values = [own[name] for own in medians.values()]
        axes[0].plot(hosts, values, marker="o", markersize=3, label=label)
    axes[0].set_ylabel("seconds")
    axes[0].set_ylim(0, 24)
    axes[0].legend(fontsize=7, loc="upper right")
    for axis, name, label, unit in (
        (axes[1], "bytes", "kB/s through the first host, while all train", 1e3),
        (axes[2], "core", "cores that the launcher uses, while all train", 1),
    ):
        values = [own[name] / unit for own in medians.values()]
        axis.plot(hosts, values, marker="o", markersize=3)
        axis.plot([0, hosts[-1]], [0, values[-1]], linestyle=":", color="grey")
        axis.set_ylabel(label, fontsize=8)
        axis.set_ylim(0)
    for axis in axes:
        axis.set_xlabel("hosts, with eight ranks each")
        axis.set_xlim(0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    docs = Path(__file__).parents[1] / "docs"
    plot(json.loads(sys.argv[1]), docs / "growth_hosts.png")
