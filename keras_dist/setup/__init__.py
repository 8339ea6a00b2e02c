"""From the arguments of one call of `dist_fit` to what this rank is going to do.

- `arguments`: `Options`, the arguments that `Model.fit` does not have
- `sources`: compare the ranks' data: the same batches on all, or each rank its own
- `fit_setup`: `prepare` decides everything for this rank: one frozen `FitSetup`
- `shard`: `keras_dist.shard`, by which the user divides a data set before decoding
"""
