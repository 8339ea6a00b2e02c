"""What a model does in a step, an evaluation and a prediction.

- `install`: change Keras for a fit, and undo it
- `step`: the train step, in stages: the mixin `DistributedStep`
- `session`: `Session`, what a fit remembers; `TracedFunctions`, what a model keeps
- `build`: build the model at its first batch, then call hooks
- `losses`: this rank's part of each loss and logged number, as Keras's losses declare
- `trial`: what else a step is of its rows, tried on the first batch; `check_split`
- `rows`: losses over the rows of all ranks: `sum_over_rows`, `gather_rows`
- `metrics`: synchronize metrics; `metric_state`: the state of one metric
- `saving`: save models once and whole
- `same_values`: compare what has to be equal on all ranks
- `state_trial`: metrics and state that the parts of a batch do not add up to
- `batch_norm`: normalize by the statistics of the global batch
- `turns`: what batches draw that ranks evaluate, or predict, in turn
- `recorded_step`: a step in parts, gradients, allreduce and update, where XLA compiles
  the first and the last
- `remember`: remember variables, and put them back
- `predict`: predict batches in turns, and gather the predictions
"""
