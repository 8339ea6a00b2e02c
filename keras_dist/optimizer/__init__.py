"""Average gradients over the ranks before each update, at the scaled rate."""

from keras_dist.optimizer.accumulation import (
    divide,
    is_between_updates,
    own_sums,
    sum_accumulated,
)
from keras_dist.optimizer.averaging import (
    DistributedOptimizer,
    Recorded,
    apply_recorded,
    averages_by_rows,
    averaging,
    guarded_update,
    hoist,
    is_distributed,
    local_ids,
    only_averaging,
    unwatch,
    watch,
)
from keras_dist.optimizer.gradients import average_gradients
from keras_dist.optimizer.local_steps import (
    synchronize_replicas,
    uses_local_sgd,
)
from keras_dist.optimizer.nan_guard import Guard, Hit
from keras_dist.optimizer.nested import leaves, nested_optimizers, optimizers_of
from keras_dist.optimizer.options import Averaging, check_usable, every_of
from keras_dist.optimizer.rate import (
    effective_rate,
    go_on,
    position_of,
    scale_rate,
    schedule_of,
    unscale_rate,
)
from keras_dist.optimizer.stop_request import StopRequest
from keras_dist.optimizer.stopwatch import Stopwatch

__all__ = [
    "Averaging",
    "DistributedOptimizer",
    "Guard",
    "Hit",
    "Recorded",
    "StopRequest",
    "Stopwatch",
    "apply_recorded",
    "guarded_update",
    "averages_by_rows",
    "averaging",
    "check_usable",
    "divide",
    "effective_rate",
    "every_of",
    "go_on",
    "uses_local_sgd",
    "hoist",
    "is_between_updates",
    "is_distributed",
    "leaves",
    "local_ids",
    "only_averaging",
    "optimizers_of",
    "own_sums",
    "nested_optimizers",
    "position_of",
    "scale_rate",
    "schedule_of",
    "average_gradients",
    "sum_accumulated",
    "synchronize_replicas",
    "unscale_rate",
    "unwatch",
    "watch",
]
