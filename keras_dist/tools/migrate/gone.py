"""What Keras 2 has and Keras 3 has not: names, members, arguments, symbolic tensors.

The names of the installed Keras 3 are read from its files, without importing it.
`tf.keras` has names that `keras` has not, such as `backend.mean`, and the other way
round, such as `losses.mean_squared_error`.
"""

import ast
import builtins
import functools
import importlib.util
import os
from pathlib import Path

import libcst as cst

from keras_dist.tools.migrate import imports
from keras_dist.tools.migrate.arguments import keyword
from keras_dist.tools.migrate.script import (
    OPTIMIZERS,
    Script,
    canonical,
    dotted,
    method_of,
)

# What other rules change or list: calls, and names.
_OF_RATE = {f"keras.backend.{name}" for name in ("get_value", "set_value", "eval")}
_OF_OTHER_RULES = {
    *(f"keras.backend.{name}" for name in ("get_session", "set_session")),
    "keras.optimizers.legacy",
    *(f"keras.optimizers.legacy.{name}" for name in OPTIMIZERS),
}

# What to write instead of names for which Keras 3 has none of the same end.
_ADVICE = {
    "keras.wrappers.scikit_learn": "Use keras.wrappers.SKLearnClassifier",
    "keras.layers.CuDNNGRU": "Use keras.layers.GRU, which uses cuDNN by itself",
    "keras.layers.CuDNNLSTM": "Use keras.layers.LSTM, which uses cuDNN by itself",
    "keras.layers.DenseFeatures": "Use keras.utils.FeatureSpace",
    "keras.losses.Reduction": 'Use text, such as reduction="sum"',
    "keras.backend.learning_phase": "Pass training= to the model or layer",
    "keras.backend.set_learning_phase": "Pass training= to the model or layer",
    "keras.backend.function": "Use keras.Model(inputs, outputs)",
    "keras.backend.placeholder": "Use keras.Input",
    "keras.utils.multi_gpu_model": "Use one rank for each GPU",
    "keras.utils.Sequence": "Use keras.utils.PyDataset",
    "keras.models.model_from_yaml": "Use keras.models.model_from_json",
    "keras.mixed_precision.experimental": "Use keras.mixed_precision",
}

_NODES = "Make a keras.Model of the layer's own input and output"
# Members of models, layers, metrics and optimizers of Keras 2, of which no class of
# Keras 3 has one.
_MEMBERS = {
    "reset_states": "Use reset_state() of a metric or a layer",
    "get_scaled_loss": "Use scale_loss(loss)",
    "get_unscaled_gradients": "Remove it: apply() divides by the loss scale itself",
    "aggregate_gradients": "Remove it: hvd.DistributedOptimizer averages in apply()",
    "add_update": "Assign the variable in call(): variable.assign(value)",
    "to_yaml": "Use to_json()",
    "state_updates": "Remove it: layers assign their variables themselves",
    "autotune_steps_per_execution": 'Use compile(steps_per_execution="auto")',
    "get_weight_paths": "Use the path of each variable",
    "with_name_scope": "Use keras.name_scope",
    "get_input_at": _NODES,
    "get_input_mask_at": _NODES,
    "get_input_shape_at": _NODES,
    "get_output_at": _NODES,
    "get_output_mask_at": _NODES,
    "get_output_shape_at": _NODES,
    "inbound_nodes": _NODES,
    "outbound_nodes": _NODES,
}
_OF_OPTIMIZERS = {
    "get_weights": "Use optimizer.variables",
    "set_weights": "Assign each of optimizer.variables",
    "get_gradients": "Use tf.GradientTape",
    "get_updates": "Use optimizer.apply(gradients, variables)",
    "compute_gradients": "Use tf.GradientTape",
    "minimize": "Use tf.GradientTape, and optimizer.apply(gradients, variables)",
}
_OF_MODELS = {
    "predict_classes": "Use predict(x).argmax(axis=-1)",
    "predict_proba": "Use predict(x)",
}

_JIT = {"jit_compile": "Pass jit_compile= to compile of the model"}
_RECURRENT = {"time_major": "Transpose the input, so that its first axis is the batch"}
# Arguments that Keras 3 does not take, of methods and of what `keras` has.
_OF_METHODS = {
    "compile": {
        "sample_weight_mode": "Remove it: sample weights may have an axis for time",
        "target_tensors": "Pass the targets to fit",
        "distribute": "Remove it",
        "pss_evaluation_shards": "Remove it",
    },
    "train_on_batch": {"reset_metrics": "Call reset_metrics() of the model"},
    "test_on_batch": {"reset_metrics": "Call reset_metrics() of the model"},
}
_ARGUMENTS = {
    **{f"keras.optimizers.{name}": _JIT for name in OPTIMIZERS},
    "keras.layers.RNN": _RECURRENT,
    "keras.layers.LSTM": _RECURRENT,
    "keras.layers.GRU": _RECURRENT,
    "keras.layers.Softmax": {"robust_masking": "Remove it: a mask is always exact"},
    "keras.callbacks.ModelCheckpoint": {"options": "Remove it"},
    "keras.callbacks.ProgbarLogger": {
        "count_mode": "Remove it",
        "stateful_metrics": "Remove it",
    },
    "keras.layers.BatchNormalization": {
        "fused": "Remove it",
        "virtual_batch_size": "Remove it; there is no such normalization any more",
    },
    "keras.utils.to_categorical": {
        "y": "Pass the first argument without a name",
        "dtype": "Call astype on the result",
    },
    "keras.utils.load_img": {"grayscale": 'Pass color_mode="grayscale"'},
    "keras.preprocessing.image.load_img": {"grayscale": 'Pass color_mode="grayscale"'},
    "keras.activations.relu": {"alpha": "Pass negative_slope="},
}

_PRIVATE = ("src", "api")

# Of TensorFlow's operations, those that `keras.ops` has by another name.
_RENAMED = {
    "concat": "concatenate",
    "random.normal": "random.normal",
    "math.log": "log",
    "math.exp": "exp",
    "image.resize": "image.resize",
    "nn.l2_normalize": "normalize",
}
_TENSORS = ("output", "input", "outputs", "inputs")


def list_import(node: cst.Import | cst.ImportFrom, script: Script) -> None:
    """`from keras.utils import multi_gpu_model`, `import keras.engine`."""
    module = ""
    if isinstance(node, cst.ImportFrom):
        module = dotted(node.module) or ""
        if node.relative or imports.is_private(module):
            return
        if canonical(module) in _OF_OTHER_RULES:
            return
        module += "."
    if isinstance(node.names, cst.ImportStar):
        _list(node, module[:-1], script)
        return
    for alias in node.names:
        name = module + (dotted(alias.name) or "")
        if not module or not imports.is_moved(name, script):
            _list(node, name, script)


def list_name(node: cst.Attribute, script: Script) -> None:
    """`tf.keras.losses.mean_squared_error`, `K.placeholder`."""
    name = script.names.raw(node)
    is_inside = node in script.in_imports or not script.is_longest(node)
    if name is not None and not is_inside and not script.is_shadowed(node):
        first = (dotted(node) or "").partition(".")[0]
        is_listed = imports.is_private(script.names.local[first])  # at its import
        if not is_listed and not imports.is_moved(name, script):
            _list(node, name, script)


def _list(node: cst.CSTNode, raw: str, script: Script) -> None:
    name, is_tf = keras_name(raw)
    is_import = isinstance(node, (cst.Import, cst.ImportFrom))
    gone = None
    if name.startswith("keras."):
        gone = missing(name, is_tf=is_tf, is_import=is_import)
    if gone is None or script.is_guarded(node) or {gone, name} & _OF_OTHER_RULES:
        return
    if name in _OF_RATE and script.is_called(node):
        return
    prefixes = [name]
    while prefixes[-1] != gone:
        prefixes.append(prefixes[-1].rpartition(".")[0])
    found = [instead(one, is_tf=is_tf) for one in prefixes]
    advice = [_ADVICE[one] for one in prefixes if one in _ADVICE]
    advice += [imports.PUBLIC] if imports.is_private(gone) else []
    advice += [f"Use {one}" for one in found if one is not None]
    advice.append("Look for it in the documentation of Keras 3")
    prefix = "tf." if is_tf else ""
    script.leave(node, f"Keras 3 has no {prefix}{gone}", advice[0])


def list_star_name(node: cst.Name, script: Script) -> None:
    """`CuDNNLSTM(8)`, after `from keras.layers import *`."""
    name, stars = node.value, script.names.stars
    is_keras = [canonical(module).startswith("keras.") for module in stars]
    if not all(is_keras) or not stars or not script.is_read(node):
        return
    is_own = name in script.functions or name in script.names.local
    if is_own or script.values(name) or hasattr(builtins, name):
        return
    full = [keras_name(f"{module}.{name}") for module in stars]
    if all(missing(one, is_tf=is_tf) is not None for one, is_tf in full):
        _list(node, f"{stars[0]}.{name}", script)


def list_member(node: cst.Attribute, script: Script) -> None:
    """`metric.reset_states()`, `optimizer.get_scaled_loss(loss)`."""
    word, owner = node.attr.value, node.value
    if script.names.of(owner) is not None or word in script.functions:
        return
    advice = _MEMBERS.get(word)
    if script.is_optimizer(owner):
        advice = advice or _OF_OPTIMIZERS.get(word)
    elif script.is_model(owner):
        advice = advice or _OF_MODELS.get(word)
    if advice is not None and not script.is_guarded(node):
        reason = f"models, optimizers and metrics of Keras 3 have no {word}"
        script.leave(node, reason, advice)


def list_method(old: cst.ClassDef, script: Script) -> None:
    """`def reset_states(self)` of a metric, which Keras 3 would not call."""
    bases = [script.names.of(base.value) or "" for base in old.bases]
    if any(name.startswith("keras.metrics.") for name in bases):
        for node in old.body.body:
            if isinstance(node, cst.FunctionDef) and node.name.value == "reset_states":
                reason = "Keras 3 does not call reset_states"
                script.leave(node.name, reason, "Name it reset_state")


def list_arguments(old: cst.Call, new: cst.Call, script: Script) -> cst.Call:
    """`compile(sample_weight_mode="temporal")`, `LSTM(8, time_major=True)`."""
    name = script.names.of(old.func)
    known = _OF_METHODS if name is None else _ARGUMENTS
    what = method_of(old) if name is None else name
    for argument, advice in known.get(what, {}).items():
        if keyword(new, argument) is not None:
            script.leave(old, f"{what} of Keras 3 has no {argument}=", advice)
    return new


def keras_name(name: str) -> tuple[str, bool]:
    """Return a name as one of `keras`, and whether the script has it from `tf.keras`.

    >>> keras_name("tensorflow.keras.layers")
    ('keras.layers', True)
    """
    return canonical(name), name.startswith("tensorflow.")


@functools.cache
def _api(*, is_tf: bool) -> dict[str, frozenset[str]]:
    """Return the public names of each module of `keras`, or of `tf.keras`."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    if (folder / "api").is_dir():
        folder /= "api"
    if is_tf:
        folder = folder / "_tf_keras" / "keras"
    found = {}
    for path, folders, files in os.walk(folder):
        inner = [one for one in folders if not one.startswith("_")]
        folders[:] = [one for one in inner if one not in _PRIVATE]
        if "__init__.py" in files:
            module = f"keras.{Path(path).relative_to(folder)}".replace(os.sep, ".")
            module = module.rstrip(".")
            found[module] = frozenset(_names_of(Path(path) / "__init__.py"))
    return found


def _names_of(file: Path) -> set[str]:
    """Return the names that a file imports."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def missing(name: str, *, is_tf: bool, is_import: bool = False) -> str | None:
    """Return the part of a name up to the first word that Keras 3 does not have.

    Args:
        name: A name that begins with "keras.".
        is_tf: Whether a script has it from `tf.keras`.
        is_import: Whether an import asks for it, which finds `tensorflow.keras.saving`,
            for example; as an attribute, `tf.keras` does not have it.

    Returns:
        `None` if Keras 3 has the name, or if this cannot be known: it is private, or a
        member of a class.

    >>> missing("keras.layers.experimental.preprocessing.Rescaling", is_tf=True)
    'keras.layers.experimental'
    >>> missing("keras.layers.Dense.anything", is_tf=True)
    """
    api = _api(is_tf=is_tf)
    words = name.split(".")
    for index, word in enumerate(words[1:], start=1):
        names = api.get(".".join(words[:index]))
        if names is None or word.startswith("_") or word in _PRIVATE:
            return None
        inner = ".".join(words[: index + 1])
        if word not in names and not (is_import and inner in api):
            return inner
    return None


def instead(name: str, *, is_tf: bool) -> str | None:
    """Return a name of Keras 3 that ends as a missing one does, if there is one.

    Args:
        name: The missing name.
        is_tf: Whether a script has it from `tf.keras`.

    >>> instead("keras.layers.experimental.preprocessing.Rescaling", is_tf=True)
    'tf.keras.layers.Rescaling'
    >>> instead("keras.backend.mean", is_tf=False)
    'keras.ops.mean'
    """
    *_, package, last = name.split(".")
    if package == "backend" and last in _api(is_tf=False).get("keras.ops", ()):
        return f"keras.ops.{last}"
    if missing(name, is_tf=not is_tf) is None and _api(is_tf=not is_tf):
        return name if is_tf else f"tf.{name}"
    prefix = "tf." if is_tf else ""
    modules = [module for module, names in _api(is_tf=is_tf).items() if last in names]
    modules.sort(key=lambda module: (package not in module, len(module), module))
    # Words in small letters may mean something else in another module.
    return f"{prefix}{modules[0]}.{last}" if last[:1].isupper() and modules else None


def list_operation(node: cst.Call, script: Script) -> None:
    """`tf.reduce_mean(x)` of the output of a layer, which Keras 3 does not take.

    `keras.Input` makes a symbolic tensor, and so does each layer that is called with
    one.
    """
    name = script.names.of(node.func) or ""
    is_operation = name.startswith(("tf.", "tf1.", "keras.backend."))
    if not is_operation or script.is_shadowed(node.func):
        return
    if name in ("tf.function", "keras.backend.int_shape"):
        return
    if any(_is_symbolic(arg.value, script) for arg in node.args):
        text = dotted(node.func) or name
        reason = f"{text} does not take a symbolic tensor of Keras 3"
        word = name.partition(".")[2].removeprefix("backend.")
        short = _RENAMED.get(word) or word.rpartition(".")[2].removeprefix("reduce_")
        other = short if short.startswith("random.") else f"ops.{short}"
        advice = f"Use keras.{other}, if there is one, or a layer that calls it"
        script.leave(node, reason, advice)


def _is_symbolic(
    node: cst.CSTNode, script: Script, seen: set[cst.CSTNode] | None = None
) -> bool:
    """Tell whether an expression is a symbolic tensor, or a list with one.

    Args:
        node: The expression.
        script: The file.
        seen: Names that were visited; in a loop, values depend on each other.
    """
    known_names = set() if seen is None else seen

    def has_one(*nodes: cst.CSTNode) -> bool:
        return any(_is_symbolic(one, script, known_names) for one in nodes)

    if isinstance(node, cst.Call):
        return _gives_symbolic(node, script, has_one(*(arg.value for arg in node.args)))
    if isinstance(node, (cst.List, cst.Tuple)):
        return has_one(*(one.value for one in node.elements))
    if isinstance(node, cst.BinaryOperation):
        return has_one(node.left, node.right)
    if isinstance(node, cst.UnaryOperation):
        return has_one(node.expression)
    if isinstance(node, cst.Subscript):
        return has_one(node.value)
    if isinstance(node, cst.Attribute) and node.attr.value in _TENSORS:
        return script.is_model(node.value)
    if isinstance(node, cst.Name) and node not in known_names:
        known_names.add(node)
        values = [v for v in script.values_at(node.value, node) if v is not node]
        known = [value for value in values if value is not None]
        return len(known) == len(values) > 0 and has_one(*known)
    return False


def _gives_symbolic(node: cst.Call, script: Script, is_called_with_one: bool) -> bool:
    """Tell whether a call is `keras.Input(…)`, or a layer or function of a tensor."""
    name = script.names.of(node.func)
    if name in ("keras.Input", "keras.layers.Input"):
        return True
    # A method such as `x.shape.as_list()`, a class and TensorFlow's functions are not.
    is_ours = name is None and not isinstance(node.func, cst.Attribute)
    is_operation = (name or "").startswith("keras.ops.")
    return is_called_with_one and (is_ours or is_operation)
