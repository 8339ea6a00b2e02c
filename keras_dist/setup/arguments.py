"""Those arguments of `dist_fit` that `Model.fit` has, too."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KerasArguments:
    """Every argument of `keras.Model.fit`, with Keras's default.

    `dist_fit` takes these and those of `setup.options.Options`, and no others.
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
        """The arguments as a dict for `keras.Model.fit`; the data is not copied."""
        return dict(vars(self))

    def data(self) -> dict[str, Any]:
        """What is trained on and evaluated, by the names of the arguments."""
        names = ("x", "y", "sample_weight", "validation_data")
        return {name: getattr(self, name) for name in names}

    @property
    def has_validation(self) -> bool:
        """Whether there is validation data."""
        return self.validation_data is not None or bool(self.validation_split)
