"""Batch normalization by the rows of all ranks, by Horovod's name."""

from typing import Any

import keras

from keras_dist.training.batch_norm import GlobalMoments


@keras.saving.register_keras_serializable(package="keras_dist.horovod")
class SyncBatchNormalization(GlobalMoments, keras.layers.BatchNormalization):
    """`BatchNormalization` whose mean and variance are those of the rows of all ranks.

    Args:
        fused: Only `False`.
        **kwargs: Arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: If `fused` is `True` or `None`.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), SyncBatchNormalization()])
    >>> model.output_shape
    (None, 2)
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                "SyncBatchNormalization cannot be fused. Received: fused="
                f"{fused}. Leave it out."
            )
        super().__init__(**kwargs)
