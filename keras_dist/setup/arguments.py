"""The arguments of `dist_fit`: those that `Model.fit` has too, and all others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import keras

from keras_dist import optimizer
from keras_dist.data.steps import StepsRule
from keras_dist.optimizer.options import Compression, Op, Sparse
from keras_dist.optimizer.rate import LearningRateRule

BATCH_VARIABLE = "KERAS_DIST_BATCH"

# What `Model.fit`, `evaluate` and `predict` take as `callbacks`.
Callbacks: TypeAlias = (
    Sequence[keras.callbacks.Callback]
    | keras.callbacks.Callback
    | keras.callbacks.CallbackList
    | None
)


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
    callbacks: Callbacks = None
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every argument of `dist_fit` that `Model.fit` does not have, with its default."""

    batch: Literal["rank", "global"] | None = None
    lr_scaling: LearningRateRule | Literal["auto"] = "auto"
    warmup_epochs: float = 0
    steps_scaling: StepsRule = "auto"
    validation_steps_scaling: StepsRule | float = "auto"
    shard: Literal["auto", "none"] = "auto"
    leftover: Literal["auto", "cut", "whole", "drop"] = "auto"
    target_accuracy: float | None = None
    op: Op = "average"
    compression: Compression | None = None
    local_layers: Sequence[keras.layers.Layer] = ()
    process_set: Sequence[int] | None = None
    sync: str = "every:1"
    outer_momentum: float = 0.0
    sparse: Sparse = "auto"
    resume: str | os.PathLike[str] | None = None
    save_steps: int | None = None
    save_seconds: float | None = 300

    def resolved(self, environ: Mapping[str, str] = os.environ) -> "Options":
        """Decide whose batch the user's batch is, and the rules that follow from it.

        >>> options = Options(batch="global").resolved({})
        >>> options.lr_scaling, options.steps_scaling
        ('none', 'none')

        Args:
            environ: `KERAS_DIST_BATCH` is read, for a script that cannot be changed.

        Raises:
            ValueError: If `batch` is unknown, local SGD or a sum of gradients is asked
                for beside `"global"`.
        """
        batch: Any = self.batch or environ.get(BATCH_VARIABLE) or "rank"
        if batch not in ("rank", "global"):
            raise ValueError(
                '`batch` must be "rank" (the batch size is that of one rank) or '
                f'"global" (it is that of all ranks together). Received: {batch!r}'
                + ("" if self.batch else f" in {BATCH_VARIABLE}")
            )
        if batch == "global" and optimizer.every_of(self.sync) > 1:
            raise ValueError(
                'batch="global" gives the model of one process, and local SGD does '
                f'not. Received: batch="global" and sync={self.sync!r}. Leave one out.'
            )
        if batch == "global" and self.op != "average":
            raise ValueError(
                'batch="global" gives the model of one process, and a sum of gradients '
                "depends on the number of ranks. Received: "
                f'batch="global" and op={self.op!r}. Leave one out.'
            )
        is_global = batch == "global"
        usual: dict[str, Any] = {
            "lr_scaling": "none" if is_global else "linear",
            "steps_scaling": "none" if is_global else "divide",
            "validation_steps_scaling": "none" if is_global else "divide",
        }
        rules = {n: rule for n, rule in usual.items() if getattr(self, n) == "auto"}
        return replace(self, batch=batch, **rules)

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
