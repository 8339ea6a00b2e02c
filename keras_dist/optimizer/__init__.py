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
    hoist,
    is_distributed,
    local_ids,
    recording,
    unwatch,
    watch,
)
from keras_dist.optimizer.gradients import average_gradients
from keras_dist.optimizer.guard import Guard, Hit, guarded, watched_by
from keras_dist.optimizer.local_steps import (
    after_update,
    synchronize_replicas,
    uses_local_sgd,
)
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
from keras_dist.optimizer.row_weights import (
    is_loss_weighed,
    row_fraction,
    rows_now,
    weighted_by,
)
from keras_dist.optimizer.stop_request import sent_with_gradients
from keras_dist.optimizer.stopwatch import Stopwatch, timed_by

__all__ = [
    "Averaging",
    "DistributedOptimizer",
    "Guard",
    "Hit",
    "Recorded",
    "Stopwatch",
    "after_update",
    "apply_recorded",
    "averages_by_rows",
    "averaging",
    "sent_with_gradients",
    "check_usable",
    "divide",
    "effective_rate",
    "guarded",
    "every_of",
    "go_on",
    "uses_local_sgd",
    "hoist",
    "is_between_updates",
    "is_distributed",
    "is_loss_weighed",
    "leaves",
    "local_ids",
    "optimizers_of",
    "own_sums",
    "nested_optimizers",
    "position_of",
    "recording",
    "rows_now",
    "scale_rate",
    "schedule_of",
    "average_gradients",
    "row_fraction",
    "timed_by",
    "sum_accumulated",
    "synchronize_replicas",
    "unscale_rate",
    "unwatch",
    "watch",
    "watched_by",
    "weighted_by",
]
