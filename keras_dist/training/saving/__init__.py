"""Save models: once for all ranks, and each file as a whole.

- `once`: what all ranks save is written by the first rank
- `atomic`: replace files as a whole; `SavesWhole`, the model's own methods during a fit
"""

from keras_dist.training.saving.once import begin_interval, install

__all__ = ["begin_interval", "install"]
