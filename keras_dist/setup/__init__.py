"""From the arguments of one call of `dist_fit` to what this rank is going to do.

- `arguments`: `KerasArguments`, the arguments of `dist_fit` that `Model.fit` has, too
- `options`: `Options`, all other arguments of `dist_fit`
- `checks`: check that the model can be trained on many ranks
- `same_batches`: find out whether the ranks have the same batches or each its own
- `fit_setup`: `prepare` decides everything for this rank: one frozen `FitSetup`
- `describe`: the same decisions in words and numbers, for the plan that is printed
"""
