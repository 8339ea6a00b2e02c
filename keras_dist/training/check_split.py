"""`check_split`: would several ranks train this model as one process does?"""

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_dist.training import batch_norm, build, state_trial, step, trial
from keras_dist.training.install import open_fit
from keras_dist.training.session import FitDecisions


@dataclass(frozen=True)
class Split:
    """The gradients of two parts of a batch, compared with the gradient of the batch.

    Args:
        kinds: For each update of the step, what its gradients are over rows: "mean",
            "sum" or "neither"; "not seen yet" if they were 0.
        weights: For each weight, the relative difference of the gradient that several
            ranks would apply; 0.01 is 1 %. Empty if the step is random, so that rows
            were repeated instead.
        notes: Sentences about what the gradients do not show.
    """

    kinds: tuple[str, ...]
    weights: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if several ranks make the updates of one process."""
        return set(self.kinds) <= {"mean", "sum"}

    def __str__(self) -> str:
        width = max(map(len, self.weights), default=0)
        rows = [f"{path:<{width}}  {d:.2%}" for path, d in self.weights.items()]
        return "\n".join([f"gradients: {', '.join(self.kinds)}", *rows, *self.notes])


def check_split(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None
) -> Split:
    """Compare the train step of `model` on a batch with the step on two parts of it.

    `dist_fit` does the same before its first step. This function works on one process,
    as in a notebook, and does not train. It builds the model, and changes nothing else.

    Args:
        model: A compiled `keras.Model`.
        x, y, sample_weight: One batch of at least two rows, as in
            `keras.Model.train_on_batch`.

    Returns:
        A `Split`. Print it to read the result.

    Raises:
        ValueError: If the step cannot be tried. The message has the reason.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", lambda y, p: keras.ops.sum((y - p) ** 2))
    >>> check_split(model, np.ones((8, 2)), np.ones((8, 1))).is_exact
    True
    """
    data = keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf),
        keras.utils.pack_x_y_sample_weight(x, y, sample_weight),
    )
    found = trial.Trial(reason=trial.explain_untriable(data))
    if not found.reason:
        with open_fit(model, FitDecisions(attaches=True)):
            own_step = step.own_train_step(model)
            build.start(model, data, own_step, is_eager=model.run_eagerly)
            found = trial.try_alone(trial.Runner(model, own_step), data)
    if found.reason:
        raise ValueError(f"`check_split` cannot try this train step: {found.reason}.")
    kinds = tuple(kind or trial.NOT_SEEN for kind in found.updates)
    notes = [batch_norm.explain_unsynchronized(model).strip()]
    notes += state_trial.describe(found.states)
    if unseen := found.describe_unseen():
        notes.append(f"{unseen}, {trial.NOT_SEEN}: try another batch.")
    weights = dict(sorted(found.weights.items()))
    return Split(kinds, weights, tuple(filter(None, notes)))
