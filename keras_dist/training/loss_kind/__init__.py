"""Which losses of a step are means over rows and which are sums: `of_all_rows`.

N ranks average their gradients, weighted by rows. That is the gradient of the global
batch if the loss of each rank is a mean over its rows. A loss that is something else is
first multiplied by a factor: this rank's fraction of what it is divided by over all
ranks, over this rank's fraction of the rows. So for each loss one question decides: is
it a mean over rows (nothing to do), a sum over rows (its divisor is 1 on one process),
or a sum divided by another sum, such as the number of unmasked elements (its divisor)?

1. **Losses of Keras** (`compile(loss=…)`, `keras.losses.Loss`) say it themselves: by
   their `reduction`, their mask and their sample weights (`row_losses`, `keras_own`).
2. **Everything else** (`add_loss`, a loss of the user's, what a user's `train_step`
   adds up and gives to a `GradientTape`, what it logs by `keras.metrics.Mean`) is read
   in the graph that Keras traces anyway; nothing of the model is run. `graph` finds the
   tensors with rows, from the loss backward; `terms` splits sums, differences and
   products with constants into terms; `probe` copies what lies between a term and the
   nearest tensors with rows, and runs that on random numbers: on two rows, on three
   others, on all five. What adds up is a sum; what is their weighted mean is a mean.
3. What is neither is averaged as a mean, with a warning that names the operation.
4. **A step that runs eagerly** has no graph. It is traced once in one that never runs,
   and `eager_log` keeps the answers in the order in which the step asks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist import mixin, private
from keras_dist.training.loss_kind.probe import num_rows
from keras_dist.training.loss_kind.row_losses import (
    RowLosses,
    definer,
    is_all_of_keras,
    is_keras_path_to_update,
)
from keras_dist.training.loss_kind.terms import EagerLog

__all__ = [
    "EagerLog",
    "RowLosses",
    "definer",
    "is_all_of_keras",
    "is_keras_path_to_update",
    "num_rows",
    "of_all_rows",
]


@contextlib.contextmanager
def of_all_rows(model: Any, log: EagerLog) -> Iterator[RowLosses]:
    """Inside the block, the row-weighted mean of losses is that of the global batch.

    Keras's own train step and those of users call `keras.losses.Loss.__call__` for the
    losses of `compile`, `Model._aggregate_additional_loss` for those of `add_loss`,
    `tf.GradientTape.gradient` for the gradients of anything that they have added up
    themselves, and `keras.metrics.Mean.update_state` to log it. A user's step may make
    such objects as it runs, so it is these methods that are replaced, in this step.

    Args:
        model: The model that is trained.
        log: What was read in the graph of the step, for one that runs eagerly.
    """
    losses = RowLosses(model, log)
    methods: dict[tuple[type, str], Any] = {
        (keras.losses.Loss, "__call__"): losses.call,
        (tf.GradientTape, "gradient"): losses.gradient,
        (keras.metrics.Mean, "update_state"): losses.update_state,
        (keras.Model, private.ADDITIONAL_LOSS): losses.additional,
    }
    with mixin.replace_methods(methods):
        yield losses
