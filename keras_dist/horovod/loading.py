"""Load a model, such that its optimizer averages over the ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import keras

from keras_dist import comm
from keras_dist.horovod import hdf5
from keras_dist.horovod.averaging import average
from keras_dist.horovod.compiling import adapt
from keras_dist.horovod.gradients import Settings
from keras_dist.horovod.ops import Compression


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
    """As Keras, which knows neither its own names here nor those of Keras 2."""
    model = keras.models.load_model(path, custom_objects=objects, compile=False)
    with h5py.File(path) as file, keras.saving.custom_object_scope(objects):
        if "training_config" not in file.attrs:
            return model
        config = json.loads(file.attrs["training_config"])
        model.compile(
            keras.optimizers.deserialize(
                hdf5.optimizer_config(config["optimizer_config"], objects)
            ),
            loss=hdf5.restored(config.get("loss"), keras.losses, objects),
            loss_weights=config.get("loss_weights"),
            metrics=hdf5.restored(config.get("metrics"), keras.metrics, objects),
            weighted_metrics=hdf5.restored(
                config.get("weighted_metrics"), keras.metrics, objects
            ),
        )
        if "optimizer_weights" in file:
            model.optimizer.build(model.trainable_variables)
            hdf5.set_state(model.optimizer, file["optimizer_weights"])
    return model
