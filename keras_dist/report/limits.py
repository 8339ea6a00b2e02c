"""What takes the time of a training, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report.training import PHASES

# Of the time, above which a phase is worth a sentence.
LARGE = 0.1

_CURES = {
    "averaging": (
        "the sum of the gradients over the network. Larger batches average less often; "
        'compression="fp16" sends half of the bytes; sync="every:k" exchanges after '
        "every k steps, and is another training. See docs/levers.md."
    ),
    "waiting": (
        "ranks that wait for the slowest one. Give all ranks the same device, cores "
        "and input, and look for other programs on its host."
    ),
    "input": (
        "waiting for the next batch. Divide the work of the input by "
        "keras_dist.shard, prefetch, or decode once: see docs/how_to/data.md."
    ),
}


def limits_of(phases: Mapping[str, float], last: Sequence[float] = ()) -> list[str]:
    """A sentence for each phase but computing that takes more than a tenth.

    Args:
        phases: The fraction of the time of each phase.
        last: For each rank the fraction of steps in which it was the last to arrive.

    >>> phases = {"computing": 0.5, "averaging": 0.0, "waiting": 0.05, "input": 0.45}
    >>> print(*limits_of(phases))
    input: 45 % of the time, waiting for the next batch. Divide the work ...
    """
    large = [phase for phase in PHASES[1:] if phases[phase] >= LARGE]
    words = []
    for phase in sorted(large, key=lambda phase: -phases[phase]):
        text = f"{phase}: {phases[phase]:.0%} of the time, ".replace("%", " %")
        words.append(text + _whom(phase, last) + _CURES[phase])
    return words


def _whom(phase: str, last: Sequence[float]) -> str:
    if phase != "waiting" or not last or max(last) < 2 / len(last):
        return ""
    slowest = max(range(len(last)), key=lambda rank: last[rank])
    return f"for rank {slowest} in {last[slowest] * 100:.0f} % of the steps: "


def last_fractions(epochs: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each rank the fraction of all steps in which it was the last to arrive."""
    counted = [epoch for epoch in epochs if epoch["steps"]]
    steps = sum(epoch["steps"] for epoch in counted)
    size = min((len(epoch["ranks"]) for epoch in counted), default=0)
    return [
        sum(e["ranks"][rank]["last_fraction"] * e["steps"] for e in counted) / steps
        for rank in range(size)
    ]
