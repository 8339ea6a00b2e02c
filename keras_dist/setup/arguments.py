"""The arguments of `dist_fit` that `Model.fit` does not have."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import keras

from keras_dist.data.division import StepsRule
from keras_dist.errors import check_choice, check_count
from keras_dist.optimizer.rate import LearningRateRule

# What `Model.fit`, `evaluate` and `predict` take as `callbacks`.
Callbacks: TypeAlias = (
    Sequence[keras.callbacks.Callback]
    | keras.callbacks.Callback
    | keras.callbacks.CallbackList
    | None
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every argument of `dist_fit` that `Model.fit` does not have, with its default."""

    batch: Literal["rank", "global"] = "rank"
    lr_scaling: LearningRateRule | Literal["auto"] = "auto"
    warmup_epochs: float = 0
    steps_scaling: StepsRule = "auto"
    validation_steps_scaling: StepsRule = "auto"
    batch_norm: Literal["auto", "global", "rank"] = "auto"
    shard: Literal["auto", "none", "first"] = "auto"
    target_accuracy: float | None = None
    resume: str | os.PathLike[str] | None = None
    save_steps: int | None = None
    save_seconds: float | None = 300

    def resolve(self) -> "Options":
        """Decide the rules that follow from whose batch the user's batch is.

        >>> options = Options(batch="global").resolve()
        >>> options.lr_scaling, options.steps_scaling
        ('none', 'none')

        Raises:
            ValueError: If `batch`, `batch_norm`, `shard` or a rule for steps is
                unknown, or `save_steps` or `save_seconds` is not a positive number.
        """
        if self.batch not in ("rank", "global"):
            raise ValueError(
                '`batch` must be "rank" (the batch size is that of one rank) or '
                f'"global" (it is that of all ranks together). Received: {self.batch!r}'
            )
        for name in ("steps_scaling", "validation_steps_scaling"):
            check_choice(name, getattr(self, name), get_args(StepsRule))
        check_choice("batch_norm", self.batch_norm, ("auto", "global", "rank"))
        check_choice("shard", self.shard, ("auto", "none", "first"))
        if self.save_steps is not None:
            check_count("save_steps", self.save_steps)
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise ValueError(
                "`save_seconds` must be a number above 0, or None. "
                f"Received: save_seconds={self.save_seconds!r}"
            )
        is_global = self.batch == "global"
        usual: dict[str, Any] = {
            "batch_norm": self.batch,
            "lr_scaling": "none" if is_global else "linear",
            "steps_scaling": "none" if is_global else "divide",
            "validation_steps_scaling": "none" if is_global else "divide",
        }
        rules = {n: rule for n, rule in usual.items() if getattr(self, n) == "auto"}
        return replace(self, **rules)
