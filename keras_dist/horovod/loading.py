"""Load a model whose optimizer averages over the ranks; `compile` does so, too."""

import functools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import keras
import numpy as np

from keras_dist import comm
from keras_dist.horovod.collectives import Compression
from keras_dist.horovod.optimizer import Settings, average, average_outermost, averages


def load_model(
    filepath: str | os.PathLike[str] | h5py.File,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compression = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model with its optimizer, which averages over the ranks then.

    No collective is called, so that one rank alone may load a model.

    Args:
        filepath: A file `.keras` or `.h5` of Keras 3, also an open `h5py.File`.
        custom_optimizers: Classes of optimizers that Keras does not have.
        custom_objects: Other classes and functions, by name.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Not needed: taken for scripts that pass it.

    Returns:
        A compiled model with the weights, and the state of its optimizer.

    Raises:
        ValueError: If the file is no model, or of Keras 2.

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
    given: Any = filepath
    path = os.fspath(given.filename if isinstance(given, h5py.File) else given)
    if h5py.is_hdf5(path):
        model = _from_h5(path, objects)
    else:
        model = keras.models.load_model(path, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        comm.init()
        average(model.optimizer, Settings(compression=compression))
        adapt(model)
    return model


def _from_h5(path: str, objects: dict[str, Any]) -> Any:
    """Load as Keras does, with names such as "mse" and the state of the optimizer.

    Keras itself raises an error for such a name, and makes an optimizer for no weights.
    """
    with h5py.File(path) as file, keras.saving.custom_object_scope(objects):
        version = str(file.attrs.get("keras_version", "3"))
        if version.startswith(("1", "2")):
            raise ValueError(
                "The file was written by Keras 2, whose files Keras 3 reads in part "
                f"only. Received: {path}, of Keras {version}. Load it with tf_keras, "
                "call its `save_weights`, and make the model anew."
            )
        model = keras.models.load_model(path, compile=False)
        if "training_config" not in file.attrs:
            return model
        config = json.loads(file.attrs["training_config"])
        model.compile(
            keras.optimizers.deserialize(config["optimizer_config"]),
            loss=_restored(config.get("loss"), keras.losses, objects),
            loss_weights=config.get("loss_weights"),
            **{
                name: _restored(config.get(name), keras.metrics, objects)
                for name in ("metrics", "weighted_metrics")
            },
        )
        if "optimizer_weights" in file:
            model.optimizer.build(model.trainable_variables)
            _set_state(model.optimizer, file["optimizer_weights"])
    return model


def _restored(config: Any, module: Any, objects: Mapping[str, Any]) -> Any:
    """Losses or metrics of a file: strings stay strings, which `compile` knows.

    Args:
        config: Their entry, in lists and dicts as given to `compile`.
        module: `keras.losses` or `keras.metrics`.
        objects: Classes and functions of the user's, by name.
    """
    if isinstance(config, dict) and "class_name" in config:
        return module.deserialize(config)
    if isinstance(config, dict):
        return {k: _restored(v, module, objects) for k, v in config.items()}
    if isinstance(config, list):
        return [_restored(entry, module, objects) for entry in config]
    return objects.get(config, config)


def _set_state(optimizer: Any, group: Any) -> None:
    """Assign the state of an optimizer, which is built; a warning if it does not fit.

    Args:
        optimizer: The optimizer.
        group: Its state in a file.
    """
    values = [np.asarray(group[name]) for name in _names(group)]
    variables = list(optimizer.variables)
    if [v.shape for v in values] != [tuple(v.shape) for v in variables]:
        warnings.warn(
            "The state of the optimizer in a file does not fit, so that it begins "
            f"anew. Received: {len(values)} values for {len(variables)} variables of "
            f"{optimizer.name!r}.",
            stacklevel=4,
        )
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _names(group: Any) -> list[str]:
    """Names of the values of a group, in their order."""
    attributes = dict(group.attrs)
    return [
        name.decode() if isinstance(name, bytes) else name
        for key in sorted(attributes, key=lambda key: (len(key), key))
        if key.startswith("weight_names")
        for name in attributes[key]
    ]


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
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not averages(optimizer) or comm.size() == 1:
        return
    average_outermost(optimizer)
    model.jit_compile = False
