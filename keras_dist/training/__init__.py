"""What a model does in a step, an evaluation and a prediction.

- `step`: `install` makes a model train on all ranks: the mixin `DistributedStep`
- `session`: `Session`, the state of a model during one fit
- `first_step`: build the model at its first batch, then call hooks; `build` builds it
- `counts`: rows trained on, batches that metrics have seen, the number of the step
- `losses`: make a rank's loss its part of the loss of the global batch
- `row_terms`: which terms of a loss are sums over rows, read in its graph: `row_graph`
  finds the tensors with rows, `row_probe` tries a term, `terms_log` keeps the answers
  for steps that run eagerly; `keras_own` tells where no loss needs that
- `generators`: put random generators back after a step was only looked at
- `batch_norm`: normalize by the statistics of the global batch
- `xla_step`: a step in two functions compiled by XLA, with the allreduce in between
- `traced`: keep traced functions from one fit to the next
- `metric_scope`: whether a metric's result is one over all ranks
- `errors`: mark errors that have left the training on one rank
- `predict`: predict shards of the rows, and gather the predictions
- `autotune`: read data without TensorFlow's tuning thread
- `atomic_save`: replace files as a whole
"""
