"""Average gradients over the ranks before each update, at the scaled rate."""

from keras_dist.optimizer.averaging import (
    DistributedOptimizer,
    Recorded,
    apply_recorded,
    average_gradients,
    averaging,
    hoist,
    is_distributed,
    recording,
    rows_now,
    weighted_by,
)
from keras_dist.optimizer.parts import leaves, optimizers_of
from keras_dist.optimizer.rate import scale_rate, schedule_of, unscale_rate

__all__ = [
    "DistributedOptimizer",
    "Recorded",
    "apply_recorded",
    "average_gradients",
    "averaging",
    "hoist",
    "is_distributed",
    "leaves",
    "optimizers_of",
    "recording",
    "rows_now",
    "scale_rate",
    "schedule_of",
    "unscale_rate",
    "weighted_by",
]
