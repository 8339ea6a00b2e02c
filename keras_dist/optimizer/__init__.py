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
