"""The arguments of `dist_fit`: those that `Model.fit` has too, and all others."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_dist import optimizer
from keras_dist.data.steps import StepsRule
from keras_dist.optimizer.rate import LearningRateRule


@dataclass(frozen=True)
class KerasArguments:
    """Every argument of `keras.Model.fit`, with Keras's default.

    `dist_fit` takes these and the fields of `Options`, and no others.
    """

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: str | int = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool | str = True
    class_weight: dict[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | list[int] = 1

    def as_keywords(self) -> dict[str, Any]:
        """Return a dict for `keras.Model.fit`; the data is not copied."""
        return dict(vars(self))

    def data(self) -> dict[str, Any]:
        """Return what is trained on and evaluated, by the names of the arguments."""
        names = ("x", "y", "sample_weight", "validation_data")
        return {name: getattr(self, name) for name in names}

    @property
    def has_validation(self) -> bool:
        """Tell whether there is validation data."""
        return self.validation_data is not None or bool(self.validation_split)


@dataclass(frozen=True)
class Options:
    """Every argument of `dist_fit` that `Model.fit` does not have, with its default."""

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
        """Return the options that say how gradients are averaged, checked."""
        return optimizer.Averaging(
            op=self.op,
            compression=self.compression,
            local_layers=tuple(self.local_layers),
            process_set=self.process_set,
            every=optimizer.every_of(self.sync),
            outer_momentum=self.outer_momentum,
            sparse=self.sparse,
        )
