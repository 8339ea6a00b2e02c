"""Callbacks around Keras's training loop: a file for each job.

Public callbacks:

- `average_statistics`: synchronizes the weights that no gradient changes.
- `broadcast_variables`: copies the first rank's state to all ranks before step 1.
- `learning_rate_warmup`: scales the learning rate, with a warm-up.
- `metric_average`: makes metrics count the rows of all ranks.
- `replica_check`: compares the models of all ranks by checksums.
- `stop_at_accuracy`: stops when a metric has reached a target.
- `stop_together`: stops all ranks after the same step when one rank requests it.
- `throughput`: rows per second.

How they run:

- `fit_hooks`: `FitHooks`, the steps around the loop, in order; the callbacks above
  switch them on, and `model.fit` with one of them is a fit on all ranks
- `callback_order`: the list of `dist_fit`, and the callbacks of this rank
- `user_callbacks`: calls the user's callbacks, some on the first rank only; an error on
  one rank ends all ranks
"""
