"""Search for hyperparameters by KerasTuner or Optuna: all ranks train each trial.

The first rank runs the library's own search, so that it decides, prunes and writes as
on one process. The other ranks wait for a trial, and then call what the first rank
calls. Neither library is imported here: the first rank's objects are used.

- `keras_tuner`: `search`, in the place of `tuner.search`
- `optuna`: `optimize`, in the place of `study.optimize`, and its `Trial`
- `trials`: how a trial begins and ends on all ranks
"""

from keras_dist.tune.keras_tuner import search
from keras_dist.tune.optuna import Trial, optimize

__all__ = ["Trial", "optimize", "search"]
