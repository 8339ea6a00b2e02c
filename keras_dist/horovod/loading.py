"""Load a model whose optimizer averages over the ranks; `compile` does so, too."""

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import keras

from keras_dist import comm
from keras_dist.horovod.collectives import Compression
from keras_dist.horovod.optimizer import DistributedOptimizer, move_to_outermost
from keras_dist.optimizer.attach import is_distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compression = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with its optimizer, and make the optimizer average over the ranks.

    This calls no collective, so a single rank may load a model.

    Args:
        filepath: A `.keras` file.
        custom_optimizers: Optimizer classes that Keras does not have.
        custom_objects: Other classes and functions, by name.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Ignored; accepted for compatibility.

    Returns:
        A compiled model with its weights and the state of its optimizer.

    Raises:
        ValueError: If the file is not a model; or if it is an HDF5 file, from which
            Keras 3 does not restore the optimizer's state.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.keras")
    ...     loaded = load_model(f"{folder}/model.keras")
    >>> loaded.optimizer.__class__ is keras.optimizers.SGD
    True
    """
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects |= dict(custom_objects or {})
    if h5py.is_hdf5(filepath):
        raise ValueError(
            "Keras 3 does not restore the state of an optimizer from an HDF5 file, so "
            f"the training would not go on where it was. Received: {filepath!s}. Save "
            'the model as "model.keras". A file of Keras 2 is read by tf_keras.'
        )
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        adapt(model)
    return model


def install() -> None:
    """Change `compile` of Keras's models.

    Scripts of Horovod pass an argument that Keras 3 does not know. Where mixed
    precision wraps an optimizer, the outer one has to average. XLA cannot compile a
    collective.
    """
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    plain = vars(owner)["compile"]

    @functools.wraps(plain)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("experimental_run_tf_function", None) is not None:
            warnings.warn(
                "`experimental_run_tf_function` is left out: Keras 3 does not know "
                "this argument of `compile`. Remove it.",
                stacklevel=2,
            )
        plain(model, *args, **kwargs)
        adapt(model)

    owner.compile = compile


def adapt(model: Any) -> None:
    """Let a compiled model's outermost optimizer average, outside of XLA."""
    outermost = getattr(model, "optimizer", None)
    if outermost is None or comm.size() == 1:
        return
    if is_distributed(outermost):
        move_to_outermost(outermost)
        model.jit_compile = False
