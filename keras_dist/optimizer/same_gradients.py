"""Compare gradients of the ranks before the first exchange, which would hang."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist import comm


def check_same_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], local: set[int]
) -> None:
    """Check that all ranks have gradients of the same kinds and shapes.

    Args:
        gradients: Those of this rank; `None` where there is none.
        variables: Their variables.
        local: Identities of variables whose gradients are not exchanged.

    Raises:
        ValueError: On all ranks, if some differ.
    """
    # Only at the first update, which all ranks trace. Later, a single rank may trace
    # again, when its last batch has a new shape.
    own = {
        f"gradient {index}": (gradient, variable)
        for index, (gradient, variable) in enumerate(
            zip(gradients, variables, strict=True)
        )
        if id(variable) not in local
    }
    with tf.init_scope():
        comm.agree(
            {"the number of gradients": len(gradients)}
            | {name: _described(*pair) for name, pair in own.items()},
            names={
                name: f"of {_name(variable)}" for name, (_, variable) in own.items()
            },
            advice="Make the same model on every rank, and let every variable take "
            "part in the loss on all ranks or on none.",
        )


def _name(variable: Any) -> str:
    """The variable's path in the model; the name of a plain `tf.Variable`."""
    return getattr(variable, "path", variable.name)


def _described(gradient: Any, variable: Any) -> str:
    if gradient is None:
        return "none"
    kind = "rows of " if isinstance(gradient, tf.IndexedSlices) else ""
    return f"{kind}{gradient.dtype.name} of shape {tuple(variable.shape)}"
