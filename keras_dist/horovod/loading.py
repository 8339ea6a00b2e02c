"""Load a model whose optimizer averages over the ranks; `compile` does so, too."""

import functools
import inspect
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import h5py
import keras
import numpy as np

from keras_dist import comm, private
from keras_dist.horovod.collectives import Compression
from keras_dist.horovod.gradients import Settings
from keras_dist.horovod.optimizer import average, average_outermost, averages


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
        custom_objects: Other classes and functions, by name; also a function that takes
            the options of an optimizer or a layer and returns it.
        compression: As in `DistributedOptimizer`; not used for an optimizer that a
            function in `custom_objects` has already made one that averages.
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
    is_open = isinstance(filepath, h5py.File)
    given: Any = filepath
    path = given.filename if is_open else os.fspath(given)
    is_h5 = is_open or h5py.is_hdf5(path)
    for name in _class_names(path, is_h5=is_h5) & objects.keys():
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


def _class_names(path: str, *, is_h5: bool) -> set[str]:
    """Return the names of the classes of all objects in a file."""
    text = ""
    if is_h5:
        with h5py.File(path) as file:
            version = str(file.attrs.get("keras_version", "3"))
            if version.startswith(("1", "2")):
                raise ValueError(
                    "The file was written by Keras 2, whose files Keras 3 reads in "
                    f"part only. Received: {path}, of Keras {version}. Load it with "
                    "tf_keras, call its `save_weights`, and make the model anew."
                )
            names = ("model_config", "training_config")
            text = " ".join(str(file.attrs.get(name, "")) for name in names)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            text = file.read("config.json").decode()
    return set(re.findall(r'"class_name": *"([^"]+)"', text))


def _from_h5(path: str, objects: dict[str, Any]) -> Any:
    """Load as Keras does, with names such as "mse" and the state of the optimizer.

    Keras itself raises an error for such a name, and makes an optimizer for no weights.
    """
    model = keras.models.load_model(path, custom_objects=objects, compile=False)
    with h5py.File(path) as file, keras.saving.custom_object_scope(objects):
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
    if isinstance(config, str):
        return objects.get(config, config)
    if isinstance(config, list):
        return [_restored(entry, module, objects) for entry in config]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        return {k: _restored(v, module, objects) for k, v in config.items()}
    return module.deserialize(config)


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


_OLD = "experimental_run_tf_function"


def install() -> None:
    """Change `compile` and `get_compile_config` of Keras's models, once.

    Scripts of Horovod pass an argument that Keras 3 does not know. Where mixed
    precision wraps an optimizer, the outer one has to average. XLA cannot compile a
    collective. And a model that was saved to `.h5` has lost the optimizer that a file
    in Keras's own format names.
    """
    for name, change in (
        ("compile", _compile),
        ("get_compile_config", _get_compile_config),
    ):
        owner = next(c for c in keras.Model.__mro__ if name in vars(c))
        own = vars(owner)[name]
        if not hasattr(own, "_keras_dist_own"):
            changed = _bound(change, own)
            changed._keras_dist_own = own
            setattr(owner, name, changed)


def _bound(change: Any, own: Any) -> Any:
    @functools.wraps(own)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, own, *args, **kwargs)

    return changed


def _compile(model: Any, own: Any, *args: Any, **kwargs: Any) -> None:
    if _OLD in kwargs:
        kwargs.pop(_OLD)
        warnings.warn(
            f"`{_OLD}` is left out: Keras 3 does not know this argument of `compile`. "
            "Remove it.",
            stacklevel=3,
        )
    own(model, *args, **kwargs)
    adapt(model)


def adapt(model: Any) -> None:
    """Let a compiled model's outermost optimizer average, outside of XLA."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not averages(optimizer) or comm.size() == 1:
        return
    average_outermost(optimizer)
    model.jit_compile = False


def _get_compile_config(model: Any, own: Any) -> Any:
    config = private.compile_config(model)
    if config is not None and model.compiled and "optimizer" not in config:
        optimizer = model.optimizer
        if getattr(optimizer, "name", "") == "loss_scale_optimizer":
            optimizer = optimizer.inner_optimizer  # which `compile` wraps again
        config["optimizer"] = optimizer
    return own(model)
