"""What is in a file `.h5` beside the model: optimizer, losses and metrics.

Keras 2 names them otherwise than Keras 3: `Custom>Adam` or, for Horovod's, `Adam`; the
state of an optimizer is that of `optimizers.Adam` or of `optimizers.legacy.Adam`.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# Arguments of Keras 2's optimizers that Keras 3's do not take.
_OF_KERAS_2 = ("decay", "is_legacy_optimizer", "jit_compile")
CUSTOM = "Custom>"  # before the name of a class of the user's

# What Keras 2 calls the variables of an optimizer, and what Keras 3 does.
_SLOTS = {
    "m": "momentum",
    "v": "velocity",
    "u": "norm",
    "vhat": "velocity_hat",
    "rms": "velocity",
    "mg": "average_gradient",
    "accum_grad": "accumulated_grad",
    "accum_var": "accumulated_delta_var",
}
_COUNTERS = ("iteration", "iter")  # the second one of `optimizers.legacy`


def optimizer_config(
    config: dict[str, Any], objects: Mapping[str, Any]
) -> dict[str, Any]:
    """An optimizer's entry in a file, as Keras 3 reads it.

    Args:
        config: The entry.
        objects: Classes of the user's, by name.
    """
    name = config["class_name"].removeprefix(CUSTOM)
    if name in objects or hasattr(keras.optimizers, name):
        config = {**config, "class_name": name}
    options = {k: v for k, v in config["config"].items() if k not in _OF_KERAS_2}
    if "lr" in options:
        options["learning_rate"] = options.pop("lr")
    decay, rate = config["config"].get("decay"), options.get("learning_rate")
    if decay and isinstance(rate, float):
        schedules = keras.optimizers.schedules
        options["learning_rate"] = schedules.serialize(
            schedules.InverseTimeDecay(rate, decay_steps=1, decay_rate=decay)
        )
    return {**config, "config": options}


def restored(config: Any, module: Any, objects: Mapping[str, Any]) -> Any:
    """Losses or metrics of a file: strings stay strings, which `compile` knows.

    Args:
        config: Their entry, in lists and dicts as given to `compile`.
        module: `keras.losses` or `keras.metrics`.
        objects: Classes and functions of the user's, by name.
    """
    if isinstance(config, str):
        return objects.get(config, config)
    if isinstance(config, (list, tuple)):
        return [restored(entry, module, objects) for entry in config]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        return {k: restored(v, module, objects) for k, v in config.items()}
    options = dict(config["config"])
    if config["class_name"] == "MeanMetricWrapper":  # of Keras 2
        return restored(options["name"], module, objects)
    if config["class_name"] not in objects and options.pop("fn", None):
        if options.get("reduction") == "auto":  # Keras 2's word for the default
            options["reduction"] = "sum_over_batch_size"
        config = {**config, "config": options}
    return module.deserialize(config)


def set_state(optimizer: Any, group: Any) -> None:
    """Assign the state of an optimizer, which is built; a warning if it does not fit.

    Args:
        optimizer: The optimizer.
        group: Its state in a file.
    """
    values = {name: np.asarray(group[name]) for name in _names(group)}
    variables = list(optimizer.variables)
    if any(_words(name)[-1] in _COUNTERS and name[-2:] == ":0" for name in values):
        found = _of_keras_2(optimizer, values)
    else:
        found = list(values.values())
    if [v.shape for v in found] != [tuple(v.shape) for v in variables]:
        warnings.warn(
            "The state of the optimizer in a file does not fit, so that it begins "
            f"anew. Received: {len(values)} values for {len(variables)} variables of "
            f"{optimizer.name!r}.",
            stacklevel=5,
        )
        return
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value)


def _of_keras_2(optimizer: Any, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The values that Keras 2 has written, in the order of Keras 3's variables.

    Those of one kind are in the order of the weights in both.
    """
    is_legacy = any(_words(name)[-1] == "iter" for name in values)
    listed: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, value in values.items():
        words = _words(name)
        if words[-1] in _COUNTERS:
            kind = "iteration"
        else:  # `Adam/dense/kernel/m`, and later `Adam/m/dense/kernel`
            kind = words[-1] if is_legacy else words[min(1, len(words) - 1)]
        if kind == "v" and isinstance(optimizer, keras.optimizers.Adamax):
            kind = "u"  # of `optimizers.legacy.Adamax`
        listed[_SLOTS.get(kind, kind)].append(value)
    found = []
    for variable in optimizer.variables:
        kinds = [kind for kind in listed if f"_{variable.name}".endswith(f"_{kind}")]
        if variable is optimizer._learning_rate:
            found.append(keras.ops.convert_to_numpy(variable))
        elif kinds and listed[kinds[0]]:
            found.append(listed[kinds[0]].pop(0))
    return found


def _words(name: str) -> list[str]:
    return name.removesuffix(":0").split("/")


def _names(group: Any) -> list[str]:
    """Names of the values of a group, in their order."""
    attributes = dict(group.attrs)
    return [
        name.decode() if isinstance(name, bytes) else name
        for key in sorted(attributes, key=lambda key: (len(key), key))
        if key.startswith("weight_names")
        for name in attributes[key]
    ]
