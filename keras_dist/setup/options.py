"""Those arguments of `dist_fit` that `Model.fit` does not have."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist import optimizer
from keras_dist.data.steps import StepsRule
from keras_dist.optimizer.rate import LearningRateRule


@dataclass(frozen=True)
class Options:
    """Every keyword of `dist_fit` beside those of `Model.fit`, with its default."""

    lr_scaling: LearningRateRule = "linear"
    warmup_epochs: float = 0
    steps_scaling: StepsRule = "divide"
    validation_steps_scaling: StepsRule = "divide"
    shard: str = "auto"
    leftover: str = "auto"
    target_accuracy: float | None = None
    op: str = "average"
    compression: str | None = None
    local_layers: Sequence[Any] = ()
    process_set: Sequence[int] | None = None
    sync: str = "every:1"
    outer_momentum: float = 0.0
    sparse: str = "auto"
    timeline: str | os.PathLike[str] | None = None
    resume: str | os.PathLike[str] | None = None
    save_steps: int | None = None
    save_seconds: float | None = 300
    report: str | os.PathLike[str] | None = None

    def averaging(self) -> optimizer.Averaging:
        """The options that say how gradients are averaged, checked."""
        return optimizer.Averaging(
            op=self.op,
            compression=self.compression,
            local_layers=tuple(self.local_layers),
            process_set=self.process_set,
            every=optimizer.every_of(self.sync),
            outer_momentum=self.outer_momentum,
            sparse=self.sparse,
        )
