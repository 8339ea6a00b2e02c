"""Settings of Horovod on a rank without a GPU, by the variables that it reads."""

import os

# Where it is set, Horovod 0.28.1 crashes at a second start, as in its elastic mode.
_FUSION = "HOROVOD_FUSION_THRESHOLD"

# In each cycle of Horovod's thread the ranks exchange a message. By our change to its
# source (tools/install/patches/prompt_cycles.patch) a cycle begins as soon as there is
# a tensor, and else after so many milliseconds. A Horovod without it takes the other.
_LONGEST_CYCLE, _CYCLE = "KERAS_DIST_LONGEST_CYCLE_MS", "HOROVOD_CYCLE_TIME"

# Unless the user has set them.
_ON_CPU = {
    # At Horovod's default of 1 ms the thousand messages per second slow down a core
    # that also computes.
    _CYCLE: "2.5",
    # No fusion by Horovod. Small gradients are packed by us already; fusing large ones
    # that are ready at the same time copies them twice more, into a buffer that stays
    # allocated.
    _FUSION: "0",
    # By our change to its source (tools/install/patches/read_memory.patch) ranks of one
    # host sum large tensors over Gloo by reading each other's memory, where they may.
    "KERAS_DIST_READ_MEMORY": "1",
}


def set_for_cpu(*, is_elastic: bool) -> None:
    """Set what the user has not set, before Horovod starts.

    Args:
        is_elastic: Whether Horovod may start a second time in this process.

    Raises:
        ValueError: If a user's longest cycle is not a number of milliseconds, which
            Horovod would take for 0.
    """
    if _CYCLE not in os.environ:
        os.environ.setdefault(_LONGEST_CYCLE, "10")
    longest = os.environ.get(_LONGEST_CYCLE, "10")
    if not longest.isdecimal() or int(longest) == 0:
        raise ValueError(
            "The longest cycle of Horovod must be a whole number of milliseconds, at "
            f"least 1. Received: {_LONGEST_CYCLE}={longest!r}. Leave it out for 10."
        )
    for name, value in _ON_CPU.items():
        if name != _FUSION or not is_elastic:
            os.environ.setdefault(name, value)
