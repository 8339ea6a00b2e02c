"""Load a model, such that its optimizer averages over the ranks."""

import inspect
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import h5py
import keras

from keras_dist import comm
from keras_dist.horovod import hdf5
from keras_dist.horovod.averaging import average, averages
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
        custom_objects: Other classes and functions, by name; also a function that takes
            the options of an optimizer or a layer and returns it.
        compression: As in `DistributedOptimizer`; not used for an optimizer that a
            function in `custom_objects` has already made one that averages.
        legacy_opts: Not needed: taken for scripts that pass it.

    Returns:
        A compiled model with the weights, and the state of its optimizer.

    Raises:
        ValueError: If the file is no model.
    """
    objects: dict[str, Any] = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects |= dict(custom_objects or {})
    is_open = isinstance(filepath, h5py.File)
    path = filepath.filename if is_open else os.fspath(filepath)
    is_h5 = is_open or h5py.is_hdf5(path)
    classes = _class_names(_configs_of_h5(path) if is_h5 else _config_of_keras(path))
    for name in classes & objects.keys():
        if inspect.isroutine(objects[name]):
            objects[name] = _Maker(objects[name])
    if is_h5:
        model = _from_h5(path, objects)
    else:
        model = keras.models.load_model(path, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        comm.init()
        if not averages(model.optimizer):
            average(model.optimizer, Settings(compression=compression))
        adapt(model)
    return model


class _Maker:
    """A function in the position of a class, of which Keras calls `from_config`.

    Args:
        function: Takes the options of an object by name, and returns the object.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def from_config(self, config: dict[str, Any]) -> Any:
        """Return the object with these options."""
        return self._function(**config)


def _config_of_keras(path: str) -> Any:
    """Return the description of a model in a file `.keras`; `None` in another file."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read("config.json"))


def _configs_of_h5(path: str) -> Any:
    """Return the descriptions of the model and its training in a file `.h5`."""
    with h5py.File(path) as file:
        names = ("model_config", "training_config")
        return [json.loads(file.attrs[name]) for name in names if name in file.attrs]


def _class_names(config: Any) -> set[str]:
    """Return the names of the classes of all objects in a description."""
    if isinstance(config, dict):
        name = config.get("class_name")
        found = {name.removeprefix(hdf5.CUSTOM)} if isinstance(name, str) else set()
        return found.union(*map(_class_names, config.values()))
    return (
        set().union(*map(_class_names, config)) if isinstance(config, list) else set()
    )


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
