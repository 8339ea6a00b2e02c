"""Modules of Keras 2 whose classes are elsewhere in Keras 3."""

import libcst as cst

from keras_dist.tools.migrate.names import canonical, dotted
from keras_dist.tools.migrate.script import Script

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

# Advice for what is private.
PUBLIC = "Look for them in keras.layers, keras.utils and keras.ops"


def change_import(
    original: cst.ImportFrom, updated: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.layers.core import Dense`."""
    module = updated.module
    text = dotted(module) or ""
    if updated.relative or isinstance(updated.names, cst.ImportStar):
        return updated
    names = {dotted(one.name) or "" for one in updated.names}
    if len(names) == 1 and is_private(f"{text}.{min(names)}"):
        return _package(original, updated, script)
    if isinstance(module, cst.Attribute) and is_private(text):
        if _are_public(canonical(text), names):
            return updated.with_changes(module=module.value)
        script.left(original, f"{text} is private in Keras 2, and gone", PUBLIC)
    is_image = text == _IMAGES and names & _GENERATORS
    if is_image or (text == "keras.preprocessing" and _uses_generators(script)):
        return updated.with_changes(module=_in_tensorflow(text))
    return updated


def is_private(name: str) -> bool:
    """Whether a name is one of Keras 2's private modules, of which classes are public.

    >>> is_private("tensorflow.python.keras.utils.np_utils")
    True
    """
    package, _, module = canonical(name).rpartition(".")
    private = {"keras.layers": _LAYERS, "keras.utils": set(_UTILS)}
    return module in private.get(package, ())


def keras_name(name: str) -> tuple[str, bool]:
    """A name as one of `keras`, and whether the script has it from `tf.keras`.

    >>> keras_name("tensorflow.keras.layers")
    ('keras.layers', True)
    """
    return canonical(name), name.startswith("tensorflow.")


def changes(name: str, script: Script) -> bool:
    """Whether a name is one that `change_import` imports from elsewhere."""
    package, _, last = name.rpartition(".")
    is_generator = package == _IMAGES and last in _GENERATORS
    by_name = {script.names.local.get(last), script.names.local.get("image")}
    return is_private(name) or is_generator and not by_name.isdisjoint({name, _IMAGES})


def _package(
    original: cst.ImportFrom, updated: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.utils import np_utils` becomes `from keras import utils as np_utils`.

    If all that the file uses of it is public.
    """
    assert not isinstance(updated.names, cst.ImportStar)
    alias, package = updated.names[0], cst.ensure_type(updated.module, cst.Attribute)
    name = cst.ensure_type(alias.name, cst.Name)
    local = dotted(alias.asname.name) if alias.asname else name.value
    used = {
        node.attr.value
        for node in script.nodes
        if isinstance(node, cst.Attribute) and dotted(node.value) == local
    }
    text = f"{dotted(package)}.{name.value}"
    if not _are_public(canonical(text), used):
        script.left(original, f"{text} is private in Keras 2, and gone", PUBLIC)
        return updated
    asname = alias.asname or cst.AsName(name=name)
    alias = alias.with_changes(name=package.attr, asname=asname)
    root: cst.BaseExpression = package.value
    if (dotted(root) or "").startswith("tensorflow"):
        root = cst.parse_expression("tensorflow.keras")
    return updated.with_changes(module=root, names=[alias])


def _are_public(name: str, names: set[str]) -> bool:
    """Whether the package of a private module has all of these."""
    module = name.rpartition(".")[2]
    if module in _UTILS:
        return names <= _UTILS[module]
    return all(one[:1].isupper() for one in names)  # classes of layers


def _uses_generators(script: Script) -> bool:
    """Whether a file makes a generator of `image`, imported from `keras`."""
    if script.names.local.get("image") != _IMAGES:
        return False
    wanted = {f"image.{name}" for name in _GENERATORS}
    return any(dotted(node) in wanted for node in script.nodes)


def _in_tensorflow(text: str) -> cst.Attribute:
    node = cst.parse_expression(f"tensorflow.{text}")
    return cst.ensure_type(node, cst.Attribute)
