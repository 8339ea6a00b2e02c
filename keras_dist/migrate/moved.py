"""Modules of Keras 2 whose classes are elsewhere in Keras 3."""

import libcst as cst

from keras_dist.migrate.names import canonical, dotted
from keras_dist.migrate.script import Script

# Private modules of Keras 2, whose classes `keras.layers` has.
_LAYERS = {
    *("core", "convolutional", "pooling", "recurrent", "normalization", "embeddings"),
    *("advanced_activations", "merge", "noise", "local", "wrappers"),
}
# And those of `keras.utils`, with what it has of them.
_UTILS = {
    "np_utils": {"to_categorical", "normalize"},
    "vis_utils": {"plot_model", "model_to_dot"},
    "generic_utils": {"Progbar", "get_custom_objects", "CustomObjectScope"},
}
# What `tensorflow.keras` still has, and `keras` has not.
_IMAGES = "keras.preprocessing.image"
_GENERATORS = {"ImageDataGenerator", "DirectoryIterator", "NumpyArrayIterator"}


def change_import(
    original: cst.ImportFrom, updated: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.layers.core import Dense`."""
    module = updated.module
    text = dotted(module) or ""
    if updated.relative or isinstance(updated.names, cst.ImportStar):
        return updated
    names = {dotted(one.name) or "" for one in updated.names}
    if isinstance(module, cst.Attribute) and _is_private(canonical(text)):
        if _are_public(canonical(text), names):
            return updated.with_changes(module=module.value)
        advice = "Look for them in keras.layers, keras.utils and keras.ops"
        script.left(original, f"{text} is private in Keras 2, and gone", advice)
    is_image = text == _IMAGES and names & _GENERATORS
    if is_image or (text == "keras.preprocessing" and _uses_generators(script)):
        return updated.with_changes(module=_in_tensorflow(text))
    return updated


def _is_private(name: str) -> bool:
    package, _, module = name.rpartition(".")
    private = {"keras.layers": _LAYERS, "keras.utils": set(_UTILS)}
    return module in private.get(package, ())


def _are_public(name: str, names: set[str]) -> bool:
    """Whether the package of a private module has all of these."""
    module = name.rpartition(".")[2]
    if module in _UTILS:
        return names <= _UTILS[module]
    return all(one[:1].isupper() for one in names)  # classes of layers


def list_name(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`keras.preprocessing.image.ImageDataGenerator`."""
    text = dotted(original) or ""
    name = text.removeprefix(f"{_IMAGES}.")
    if name in _GENERATORS and script.names.local.get("keras") == "keras":
        script.left(original, f"Keras 3 has no {text}", f"Use tf.{text}")
    return updated


def _uses_generators(script: Script) -> bool:
    """Whether a file makes a generator of `image`, imported from `keras`."""
    if script.names.local.get("image") != _IMAGES:
        return False
    wanted = {f"image.{name}" for name in _GENERATORS}
    return any(dotted(node) in wanted for node in script.nodes)


def _in_tensorflow(text: str) -> cst.Attribute:
    node = cst.parse_expression(f"tensorflow.{text}")
    return cst.ensure_type(node, cst.Attribute)
