"""Load a model, such that its optimizer averages over the ranks."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import keras
import numpy as np

from keras_dist import comm
from keras_dist.horovod.averaging import average
from keras_dist.horovod.compiling import adapt
from keras_dist.horovod.gradients import Settings
from keras_dist.horovod.ops import Compression

# Arguments of Keras 2's optimizers that Keras 3's do not take.
_OF_KERAS_2 = ("decay", "is_legacy_optimizer", "jit_compile")


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model with its optimizer, which averages over the ranks then.

    No collective is called, so that one rank alone may load a model.

    Args:
        filepath: A file `.keras` or `.h5`, also an open `h5py.File`.
        custom_optimizers: Classes of optimizers that Keras does not have.
        custom_objects: Other classes and functions, by name.
        compression: As in `DistributedOptimizer`.
        legacy_opts: Not needed: taken for scripts that pass it.

    Returns:
        A compiled model with the weights, and the state of its optimizer.

    Raises:
        ValueError: If the file is no model.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects |= dict(custom_objects or {})
    is_open = isinstance(filepath, h5py.File)
    path = filepath.filename if is_open else os.fspath(filepath)
    if is_open or h5py.is_hdf5(path):
        model = _from_h5(path, objects)
    else:
        model = keras.models.load_model(path, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        comm.init()
        average(model.optimizer, Settings(compression=compression))
        adapt(model)
    return model


def _from_h5(path: str, objects: dict[str, Any]) -> Any:
    """As Keras, which neither knows its own names here nor restores optimizers."""
    model = keras.models.load_model(path, custom_objects=objects, compile=False)
    with h5py.File(path) as file, keras.saving.custom_object_scope(objects):
        if "training_config" not in file.attrs:
            return model
        config = json.loads(file.attrs["training_config"])
        model.compile(
            keras.optimizers.deserialize(_optimizer(config["optimizer_config"])),
            loss=_restored(config.get("loss"), keras.losses, objects),
            loss_weights=config.get("loss_weights"),
            metrics=_restored(config.get("metrics"), keras.metrics, objects),
            weighted_metrics=_restored(
                config.get("weighted_metrics"), keras.metrics, objects
            ),
        )
        if "optimizer_weights" in file:
            _set_state(model, file["optimizer_weights"])
    return model


def _optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's entry in a file, as Keras 3 reads it."""
    options = {k: v for k, v in config["config"].items() if k not in _OF_KERAS_2}
    if "lr" in options:
        options["learning_rate"] = options.pop("lr")
    return {**config, "config": options}


def _restored(config: Any, module: Any, objects: dict[str, Any]) -> Any:
    """Losses or metrics of a file: strings stay strings, which `compile` knows."""
    if isinstance(config, str):
        return objects.get(config, config)
    if isinstance(config, (list, tuple)):
        return [_restored(entry, module, objects) for entry in config]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        return {k: _restored(v, module, objects) for k, v in config.items()}
    if config["class_name"] == "MeanMetricWrapper":  # of Keras 2
        return config["config"]["name"]
    return module.deserialize(config)


def _set_state(model: Any, group: Any) -> None:
    model.optimizer.build(model.trainable_variables)
    attributes = dict(group.attrs)
    names = [
        name.decode() if isinstance(name, bytes) else name
        for key in sorted(attributes, key=lambda key: (len(key), key))
        if key.startswith("weight_names")
        for name in attributes[key]
    ]
    values = [np.asarray(group[name]) for name in names]
    variables = list(model.optimizer.variables)
    if [v.shape for v in values] != [tuple(v.shape) for v in variables]:
        warnings.warn(
            "The state of the optimizer in a file does not fit, so that it begins "
            f"anew. Received: {len(values)} values for {len(variables)} variables of "
            f"{model.optimizer.name!r}.",
            stacklevel=4,
        )
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
