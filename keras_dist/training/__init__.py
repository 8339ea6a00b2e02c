"""What a model does in a step, an evaluation and a prediction.

- `step`: `install` makes a model train on all ranks: the mixin `DistributedStep`
- `session`: `Session`, the state of a model during one fit
- `first_step`: build the model at its first batch, then call hooks; `build` builds it
- `counts`: rows trained on, batches that metrics have seen, the number of the step
- `loss_kind/`: which losses are means and which are sums: `of_all_rows`
- `metrics/`: synchronize metrics; `saving/`: save models once and whole
- `generators`: put random generators back after a step was only looked at
- `batch_norm`: normalize by the statistics of the global batch
- `xla_step`: a step in two functions compiled by XLA, with the allreduce in between
- `traced`: keep traced functions from one fit to the next
- `metric_scope`: whether a metric's result is one over all ranks
- `errors`: mark errors that have left the training on one rank
- `predict`: predict shards of the rows, and gather the predictions
- `autotune`: read data without TensorFlow's tuning thread
"""
