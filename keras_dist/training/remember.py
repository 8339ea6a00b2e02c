"""Remember variables, and put them back.

`data.preserve_generators` does it for random numbers.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import private
from keras_dist.optimizer.nested import optimizers_of, state_of


def list_variables(model: Any) -> list[Any]:
    """List weights, states of random generators, metrics and optimizers' variables."""
    variables = list(model.variables)
    for layer in private.layers_of(model):
        if isinstance(layer, keras.Model):
            variables += layer.metrics_variables
    for optimizer in optimizers_of(model):
        variables += state_of(optimizer)
    return variables


@contextlib.contextmanager
def preserve_variables(
    variables: Sequence[Any], *, unless: Any = None
) -> Iterator[list[tuple[Any, Any]]]:
    """Context manager that sets variables back to the values that they have now.

    Variables that are made in it are set back to their first values, unless they are
    made in a graph.

    Args:
        variables: Variables of Keras or TensorFlow.
        unless: A boolean scalar: the variables keep their new values where it is true.

    Yields:
        The variables, each with the value that it had.
    """
    once = {id(variable): variable for variable in variables}.values()
    before = [(variable, tf.identity(variable)) for variable in once]

    def make(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        if tf.executing_eagerly():
            before.append((variable, tf.identity(variable)))
        return variable

    try:
        with tf.variable_creator_scope(make):
            yield before
    finally:
        for variable, value in before:
            if unless is not None:
                value = tf.where(unless, tf.identity(variable), value)
            variable.assign(value)
