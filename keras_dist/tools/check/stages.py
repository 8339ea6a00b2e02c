"""The stages of a check: a launch of ranks each, with a time limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Seconds for a stage; imports of TensorFlow on a busy machine are most of it.
_SECONDS, _SPEED_SECONDS = 300.0, 1800.0


@dataclass(frozen=True)
class Stage:
    """A launch of ranks, and what they check, in this order.

    Args:
        name: Its name, which `worker` knows.
        checks: Group and name of each check.
        seconds: The longest that a launch may take.
        has_package: Whether the ranks import the package, and so TensorFlow; else
            they are started as programs, so that all of it may be missing.
        restarts: How often its ranks are started again, as by `run --restarts`.
        environment: Variables of its ranks.
    """

    name: str
    checks: Sequence[tuple[str, str]]
    seconds: float = _SECONDS
    has_package: bool = True
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def _checks(group: str, *names: str) -> list[tuple[str, str]]:
    return [(group, name) for name in names]


ENVIRONMENT = Stage(
    "environment",
    _checks(
        "environment",
        *("start", "versions", "Horovod", "CUDA", "code", "system"),
        *("network", "names", "clocks"),
    ),
    has_package=False,
)
DEVICES = Stage(
    "devices",
    [
        ("environment", "connect"),
        *_checks("devices", "device", "memory", "cores", "matmul"),
    ],
)
COLLECTIVES = Stage(
    "collectives",
    _checks(
        "collectives",
        *("transport", "sum", "broadcast", "gather", "latency", "bandwidth"),
    ),
)
TRUTH = Stage(
    "truth", _checks("truth", "gradient", "CNN", "Embedding", "float16", "XLA")
)
RESUME = Stage("resume", _checks("resume", "folder", "shared", "resume"), restarts=1)
SPEED = Stage(
    "speed",
    _checks("speed", "ResNet-50", "transformer"),
    seconds=_SPEED_SECONDS,
    # Ranks that do not train wait in a collective for those that do.
    environment={
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "KERAS_DIST_STALL_SECONDS": "0",
    },
)

# Without it nothing that follows can be tried.
CONNECT = ("environment", "connect")


STAGES = (ENVIRONMENT, DEVICES, COLLECTIVES, TRUTH, RESUME, SPEED)


def stages(only: str | None, *, has_speed: bool) -> list[Stage]:
    """The stages of `keras-dist check`, in their order.

    Args:
        only: Names of those to run, with commas between them; `None` for all.
        has_speed: Whether the speed is to be measured, if all are to run.

    Raises:
        ValueError: If there is no stage of such a name.
    """
    if only is None:
        return [stage for stage in STAGES if has_speed or stage is not SPEED]
    names = only.split(",")
    known = [stage.name for stage in STAGES]
    if not set(names) <= set(known):
        raise ValueError(
            f"Groups of checks are {', '.join(known)}. Received: --only {only}"
        )
    return [stage for stage in STAGES if stage.name in names]
