"""Imports: Horovod's, in all their spellings, and private modules of Keras 2."""

import libcst as cst

from keras_dist.tools.migrate.script import (
    Node,
    Script,
    canonical,
    dotted,
    dotted_node,
    walk,
)

_LAYERS = ("horovod.tensorflow.keras", "horovod.keras")
_PLAIN = "horovod.tensorflow"
_NEW = "keras_dist.horovod"

# Of `horovod.tensorflow`, what Keras scripts use and `keras_dist.horovod` has not.
MISSING = {
    "alltoall": "Use horovod.tensorflow beside it, on tensors",
    "join": "Give all ranks as many steps, or use keras_dist.dist_fit",
    "broadcast_": "Use hvd.broadcast_variables",
    "broadcast_object_fn": "Use hvd.broadcast_object",
    "size_op": "Use hvd.size()",
    "rank_op": "Use hvd.rank()",
    "local_size_op": "Use hvd.local_size()",
    "local_rank_op": "Use hvd.local_rank()",
    "process_set_included_op": "Use process_set.included()",
    "BroadcastGlobalVariablesHook": "Use "
    "hvd.callbacks.BroadcastGlobalVariablesCallback in Model.fit",
    "DistributedAdasumOptimizer": "Use "
    'keras_dist.DistributedOptimizer(…, op="adasum"), over MPI',
    "gpu_available": 'Use tf.config.list_physical_devices("GPU")',
    "check_num_rank_power_of_2": "Use hvd.size()",
    "handle_average_backwards_compatibility": "Pass op=hvd.Average or op=hvd.Sum",
    "LocalGradientAggregationHelper": "Use backward_passes_per_step= of "
    "hvd.DistributedOptimizer",
    "elastic.TensorFlowState": "Use hvd.elastic.KerasState",
}
_OTHERS = {
    "horovod.spark": "Start the ranks with keras_dist.spark.run",
    "horovod.ray": "Start the ranks with keras_dist.ray.run",
    "horovod.run": "Use keras_dist.run",
    "tf_keras": "Import keras, which is Keras 3",
}

# Private modules of Keras 2, whose classes `keras.layers` has.
_LAYER_MODULES = {
    *("core", "convolutional", "pooling", "recurrent", "normalization", "embeddings"),
    *("advanced_activations", "merge", "noise", "local", "wrappers"),
}
# And of `keras.utils`, with the names that are public there.
_UTILITIES = {
    "np_utils": {"to_categorical", "normalize"},
    "vis_utils": {"plot_model", "model_to_dot"},
    "generic_utils": {"Progbar", "get_custom_objects", "CustomObjectScope"},
}
# What `tensorflow.keras` still has, and `keras` has not.
_IMAGES = "keras.preprocessing.image"
_GENERATORS = {"ImageDataGenerator", "DirectoryIterator", "NumpyArrayIterator"}

# Advice for what is private.
PUBLIC = "Look for them in keras.layers, keras.utils and keras.ops"


def new_module(name: str) -> str | None:
    """Return the module of keras_dist for one of Horovod; `None` if there is none.

    >>> new_module("horovod.keras.callbacks")
    'keras_dist.horovod.callbacks'
    """
    for layer in _LAYERS:
        if name == layer or name.startswith(f"{layer}."):
            return _NEW + name[len(layer) :]
    return None


def change_import(old: cst.Import, new: cst.Import, script: Script) -> cst.Import:
    """`import horovod.keras as hvd`."""
    aliases: list[cst.ImportAlias] = []
    for alias in old.names:
        name = dotted(alias.name) or ""
        target = new_module(name)
        if name == _PLAIN:
            local = dotted(alias.asname.name) if alias.asname is not None else name
            target = _NEW if _has_all(script, local or "") else None
        if target is not None:
            if alias.asname is None and _uses_horovod_itself(script):
                names = [dotted(one.name) for one in (*old.names, *aliases)]
                if "horovod" not in names:
                    aliases.append(_with_comma(cst.ImportAlias(cst.Name("horovod"))))
            alias = alias.with_changes(name=dotted_node(target))
        else:
            _list_other(old, name, script)
        aliases.append(alias)
    return new.with_changes(names=aliases)


def _with_comma(alias: cst.ImportAlias) -> cst.ImportAlias:
    space = cst.SimpleWhitespace(" ")
    return alias.with_changes(comma=cst.Comma(whitespace_after=space))


def _uses_horovod_itself(script: Script) -> bool:
    """Tell whether the file uses more of Horovod than what changes, by its own name."""
    changed = {
        inner
        for node in script.nodes
        if isinstance(node, cst.Attribute)
        and (new_module(dotted(node) or "") or dotted(node) == _PLAIN)
        for inner in walk(node)
    }
    return any(
        isinstance(node, cst.Attribute)
        and dotted(node.value) == "horovod"
        and node not in changed
        and node not in script.in_imports
        for node in script.nodes
    )


def change_from(
    old: cst.ImportFrom, new: cst.ImportFrom, script: Script
) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
    """`from horovod import keras as hvd`, `from horovod.keras import size`."""
    module = dotted(old.module) or ""
    if new.relative or not (module + ".").startswith("horovod."):
        if not new.relative:
            _list_other(old, module, script)
        return new
    new = old
    target = new_module(module)
    if module == "horovod.tensorflow.compression":
        target = _NEW
    if target is not None:
        return new.with_changes(module=dotted_node(target))
    if isinstance(new.names, cst.ImportStar):
        if module == _PLAIN:
            reason = f"all names of {module}, of which {_NEW} has not all"
            script.leave(old, reason, f"Import {_NEW} as hvd, and use its names")
        _list_other(old, module, script)
        return new
    layers = [one for one in new.names if _is_layer(module, one, script)]
    if len(layers) == len(new.names) == 1:
        return _whole_layer(new, layers[0])
    others = [one for one in new.names if one not in layers]
    names = {dotted(one.name) or "" for one in others}
    rest = new.with_changes(names=others)
    if module == "horovod.tensorflow" and not names & set(MISSING):
        rest = rest.with_changes(module=dotted_node(_NEW))
    elif module == "horovod.tensorflow":
        for name in sorted(names & set(MISSING)):
            script.leave(old, f"keras_dist.horovod has no {name}", MISSING[name])
    for name in sorted(names):
        _list_other(old, f"{module}.{name}", script)
    return _split(rest, layers) if layers else rest


def _is_layer(module: str, alias: cst.ImportAlias, script: Script) -> bool:
    """Tell whether `from module import alias` imports `keras_dist.horovod` here."""
    name = f"{module}.{dotted(alias.name)}"
    if name == _PLAIN:  # `from horovod import tensorflow as hvd`
        local = dotted((alias.asname or alias).name) or ""
        return _has_all(script, local)
    return new_module(name) is not None


def change_name(old: cst.Attribute, new: cst.Attribute, script: Script) -> Node:
    """`horovod.keras.init()`, after `import horovod.keras`."""
    name = dotted(old) or ""
    if script.names.local.get("horovod") == "horovod":
        is_plain = name == _PLAIN and _has_all(script, _PLAIN)
        if old not in script.in_imports and (name in _LAYERS or is_plain):
            return dotted_node(_own_name(script))
    if script.names.of(old) == "hvd.elastic.TensorFlowKerasState":
        return new.with_changes(attr=cst.Name("KerasState"))
    return new


def _own_name(script: Script) -> str:
    """Return the name by which the changed file has `keras_dist.horovod`."""
    modules = (*_LAYERS, _PLAIN)
    imports = [node for node in script.nodes if isinstance(node, cst.Import)]
    aliases = [alias for node in imports for alias in node.names]
    is_whole = any(
        alias.asname is None and dotted(alias.name) in modules for alias in aliases
    )
    if is_whole:
        return _NEW
    for local, name in script.names.local.items():
        if name in modules:
            return local
    script.new_imports.append(("", _NEW))
    return _NEW


def change_text(old: cst.Call, new: cst.Call, script: Script) -> Node:
    """`importlib.import_module("horovod.keras")`."""
    if (dotted(old.func) or "").rpartition(".")[2] not in (
        "import_module",
        "__import__",
    ):
        return new
    if not new.args or not isinstance(new.args[0].value, cst.SimpleString):
        return new
    text = new.args[0].value
    target = new_module(str(text.evaluated_value))
    if target is None or dotted(old.func) == "__import__":
        _list_text(old, str(text.evaluated_value), script)
        return new
    changed = text.with_changes(
        value=text.value.replace(str(text.evaluated_value), target)
    )
    first = new.args[0].with_changes(value=changed)
    return new.with_changes(args=[first, *new.args[1:]])


def note_plain(script: Script) -> None:
    """Say why the `horovod.tensorflow` of a file without Keras stays."""
    if any(module.startswith("horovod.tensorflow") for module in script.names.modules):
        script.note(
            script.module,
            "the file uses no Keras, and is left as it is",
            "Horovod's own operations on tensors work with TensorFlow 2.21",
        )


def _has_all(script: Script, local: str) -> bool:
    """Tell whether keras_dist has all that a script uses of `horovod.tensorflow`."""
    uses = [(_used(node, local), node) for node in script.nodes]
    missing = [(name, node) for name, node in uses if name in MISSING]
    for name, node in missing:  # once, although asked for at each use
        script.leave(node, f"keras_dist.horovod has no {name}", MISSING[str(name)])
    return not missing


def _used(node: cst.CSTNode, local: str) -> str | None:
    """`join` for `hvd.join`."""
    name = dotted(node) if isinstance(node, cst.Attribute) else None
    return name.removeprefix(f"{local}.") if name else None


def _whole_layer(node: cst.ImportFrom, layer: cst.ImportAlias) -> cst.ImportFrom:
    """`from horovod import keras` becomes `from keras_dist import horovod as keras`."""
    asname = layer.asname or cst.AsName(name=cst.ensure_type(layer.name, cst.Name))
    alias = layer.with_changes(name=cst.Name("horovod"), asname=asname)
    return node.with_changes(module=cst.Name("keras_dist"), names=[alias])


def _split(
    rest: cst.ImportFrom, layers: list[cst.ImportAlias]
) -> cst.FlattenSentinel[cst.BaseSmallStatement]:
    """Import the layer from keras_dist, and the rest of the line from Horovod."""
    assert not isinstance(rest.names, cst.ImportStar)
    nothing = cst.MaybeSentinel.DEFAULT
    names = [*rest.names[:-1], rest.names[-1].with_changes(comma=nothing)]
    new = _whole_layer(
        rest.with_changes(lpar=None, rpar=None), layers[0].with_changes(comma=nothing)
    )
    return cst.FlattenSentinel([new, rest.with_changes(names=names)])


def _list_other(node: cst.CSTNode, name: str, script: Script) -> None:
    for module, advice in _OTHERS.items():
        if name == module or name.startswith(f"{module}."):
            script.leave(node, f"{module} is left as it is", advice)
            return


def _list_text(node: cst.CSTNode, name: str, script: Script) -> None:
    """List a module that is imported by its name in a string."""
    if name == _PLAIN or new_module(name) is not None:
        script.leave(node, f"{name} is imported by its text", f"Import {_NEW}")
    else:
        _list_other(node, name, script)


def added(module: cst.Module, script: Script) -> cst.Module:
    """Return the file with the imports that rules need, behind its last import."""
    lines = [
        f"from {name} import {what}" if name else f"import {what}"
        for name, what in script.new_imports
    ]
    if not lines:
        return module
    body = list(module.body)
    first = 0 if module.get_docstring() is not None else -1
    last = max((i for i, line in enumerate(body) if _is_import(line)), default=first)
    new = [cst.parse_statement(line) for line in dict.fromkeys(lines)]
    return module.with_changes(body=[*body[: last + 1], *new, *body[last + 1 :]])


def _is_import(line: cst.CSTNode) -> bool:
    if not isinstance(line, cst.SimpleStatementLine):
        return False
    return any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in line.body)


def change_private(
    old: cst.ImportFrom, new: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.layers.core import Dense`."""
    module = new.module
    text = dotted(module) or ""
    if new.relative or isinstance(new.names, cst.ImportStar):
        return new
    names = {dotted(one.name) or "" for one in new.names}
    if len(names) == 1 and is_private(f"{text}.{min(names)}"):
        return _package(old, new, script)
    if isinstance(module, cst.Attribute) and is_private(text):
        if _are_public(canonical(text), names):
            return new.with_changes(module=module.value)
        script.leave(old, f"{text} is private in Keras 2, and gone", PUBLIC)
    is_image = text == _IMAGES and names & _GENERATORS
    if is_image or (text == "keras.preprocessing" and _uses_generators(script)):
        return new.with_changes(module=dotted_node(f"tensorflow.{text}"))
    return new


def is_private(name: str) -> bool:
    """Tell whether a name is a private module of Keras 2, of which classes are public.

    >>> is_private("tensorflow.python.keras.utils.np_utils")
    True
    """
    package, _, module = canonical(name).rpartition(".")
    private = {"keras.layers": _LAYER_MODULES, "keras.utils": set(_UTILITIES)}
    return module in private.get(package, ())


def is_moved(name: str, script: Script) -> bool:
    """Tell whether a name is one that `change_private` imports from elsewhere."""
    package, _, last = name.rpartition(".")
    is_generator = package == _IMAGES and last in _GENERATORS
    by_name = {script.names.local.get(last), script.names.local.get("image")}
    return is_private(name) or is_generator and not by_name.isdisjoint({name, _IMAGES})


def _package(
    old: cst.ImportFrom, new: cst.ImportFrom, script: Script
) -> cst.ImportFrom:
    """`from keras.utils import np_utils` becomes `from keras import utils as np_utils`.

    If all that the file uses of it is public.
    """
    assert not isinstance(new.names, cst.ImportStar)
    alias, package = new.names[0], cst.ensure_type(new.module, cst.Attribute)
    name = cst.ensure_type(alias.name, cst.Name)
    local = dotted(alias.asname.name) if alias.asname else name.value
    used = {
        node.attr.value
        for node in script.nodes
        if isinstance(node, cst.Attribute) and dotted(node.value) == local
    }
    text = f"{dotted(package)}.{name.value}"
    if not _are_public(canonical(text), used):
        script.leave(old, f"{text} is private in Keras 2, and gone", PUBLIC)
        return new
    asname = alias.asname or cst.AsName(name=name)
    alias = alias.with_changes(name=package.attr, asname=asname)
    root: cst.BaseExpression = package.value
    if (dotted(root) or "").startswith("tensorflow"):
        root = dotted_node("tensorflow.keras")
    return new.with_changes(module=root, names=[alias])


def _are_public(name: str, names: set[str]) -> bool:
    """Tell whether the package of a private module has all of these names."""
    module = name.rpartition(".")[2]
    if module in _UTILITIES:
        return names <= _UTILITIES[module]
    return all(one[:1].isupper() for one in names)  # classes of layers


def _uses_generators(script: Script) -> bool:
    """Tell whether a file makes a generator of `image`, imported from `keras`."""
    if script.names.local.get("image") != _IMAGES:
        return False
    wanted = {f"image.{name}" for name in _GENERATORS}
    return any(dotted(node) in wanted for node in script.nodes)
