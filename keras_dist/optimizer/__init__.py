"""Average gradients over the ranks before each update, and scale the learning rate.

Three acts: *attach* the reduction to an optimizer, *reduce* its gradients in `apply`,
and *scale* its rate while it updates.

- `attach`: `DistributedOptimizer`, and the mixin whose `apply` reduces gradients
- `reduce`: `reduce_gradients`, from a rank's own gradients to the averaged ones, by one
  allreduce for gradients, rows and the stop request; `Averaging`, its options
- `rate`: the scaled learning rate, its rules and its warm-up
- `sparse`: gradients of an `Embedding`, gathered as they are, or merged
- `accumulation`: gradient accumulation with one allreduce for each update
- `step_context`: what a train step passes to `apply`, with the stop request
- `nested`: the optimizers of a model, and those inside an optimizer
"""

from keras_dist.optimizer.accumulation import (
    move_to_first_rank,
    own_sums,
    pending_sums,
)
from keras_dist.optimizer.attach import (
    DistributedOptimizer,
    Recorded,
    ReducesGradients,
    apply_recorded,
    attach_to,
    averages,
    averaging_of,
    check_again,
    is_distributed,
    move_to_outermost,
    only_attached,
)
from keras_dist.optimizer.nested import (
    leaves,
    nested_optimizers,
    optimizers_of,
    variables_of,
)
from keras_dist.optimizer.rate import (
    effective_rate,
    effective_rates,
    rate_progress,
    restore_rate_progress,
    scale_rate,
    schedule_of,
    unscale_rate,
)
from keras_dist.optimizer.reduce import (
    Averaging,
    explain_updates,
    reduce_gradients,
)
from keras_dist.optimizer.sparse import with_shape
from keras_dist.optimizer.step_context import StopRequest
