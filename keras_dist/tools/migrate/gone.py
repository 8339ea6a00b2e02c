"""What Keras 2 has and Keras 3 has not: names, members of classes, arguments."""

import builtins

import libcst as cst

from keras_dist.tools.migrate import keras_3, moved
from keras_dist.tools.migrate.arguments import keyword
from keras_dist.tools.migrate.names import canonical, dotted
from keras_dist.tools.migrate.script import OPTIMIZERS, Script

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


def list_import(
    original: cst.Import | cst.ImportFrom,
    updated: cst.Import | cst.ImportFrom,
    script: Script,
) -> cst.Import | cst.ImportFrom:
    """`from keras.utils import multi_gpu_model`, `import keras.engine`."""
    module = ""
    if isinstance(original, cst.ImportFrom):
        module = dotted(original.module) or ""
        is_of_others = moved.is_private(module) or canonical(module) in _OF_OTHER_RULES
        if original.relative or is_of_others:
            return updated
        module += "."
    if isinstance(original.names, cst.ImportStar):
        _list(original, module[:-1], script)
        return updated
    for alias in original.names:
        name = module + (dotted(alias.name) or "")
        if not module or not moved.changes(name, script):
            _list(original, name, script)
    return updated


def list_name(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`tf.keras.losses.mean_squared_error`, `K.placeholder`."""
    name = script.names.raw(original)
    is_inside = original in script.in_imports or original in script.shorter
    if name is not None and not is_inside and not script.is_shadowed(original):
        first = (dotted(original) or "").partition(".")[0]
        is_listed = moved.is_private(script.names.local[first])  # where it is imported
        if not is_listed and not moved.changes(name, script):
            _list(original, name, script)
    return updated


def _list(node: cst.CSTNode, raw: str, script: Script) -> None:
    name, is_tf = moved.keras_name(raw)
    is_import = isinstance(node, (cst.Import, cst.ImportFrom))
    gone = None
    if name.startswith("keras."):
        gone = keras_3.missing(name, is_tf=is_tf, is_import=is_import)
    if gone is None or node in script.guarded or {gone, name} & _OF_OTHER_RULES:
        return
    if name in _OF_RATE and node in script.called:
        return
    prefixes = [name]
    while prefixes[-1] != gone:
        prefixes.append(prefixes[-1].rpartition(".")[0])
    found = [keras_3.instead(one, is_tf=is_tf) for one in prefixes]
    advice = [_ADVICE[one] for one in prefixes if one in _ADVICE]
    advice += [moved.PUBLIC] if moved.is_private(gone) else []
    advice += [f"Use {one}" for one in found if one is not None]
    advice.append("Look for it in the documentation of Keras 3")
    prefix = "tf." if is_tf else ""
    script.left(node, f"Keras 3 has no {prefix}{gone}", advice[0])


def list_star_name(
    original: cst.Name, updated: cst.Name, script: Script
) -> cst.BaseExpression:
    """`CuDNNLSTM(8)`, after `from keras.layers import *`."""
    name, stars = original.value, script.names.raw_stars
    is_keras = [canonical(module).startswith("keras.") for module in stars]
    if not all(is_keras) or not stars or not script.is_read(original):
        return updated
    is_own = name in script.functions or name in script.names.local
    if is_own or script.values(name) or hasattr(builtins, name):
        return updated
    full = [moved.keras_name(f"{module}.{name}") for module in stars]
    if all(keras_3.missing(one, is_tf=is_tf) is not None for one, is_tf in full):
        _list(original, f"{stars[0]}.{name}", script)
    return updated


def list_member(
    original: cst.Attribute, updated: cst.Attribute, script: Script
) -> cst.BaseExpression:
    """`metric.reset_states()`, `optimizer.get_scaled_loss(loss)`."""
    word, owner = original.attr.value, original.value
    if script.names.of(owner) is not None or word in script.functions:
        return updated
    advice = _MEMBERS.get(word)
    if script.is_optimizer(owner):
        advice = advice or _OF_OPTIMIZERS.get(word)
    elif script.is_model(owner):
        advice = advice or _OF_MODELS.get(word)
    if advice is not None and original not in script.guarded:
        reason = f"models, optimizers and metrics of Keras 3 have no {word}"
        script.left(original, reason, advice)
    return updated


def list_method(
    original: cst.ClassDef, updated: cst.ClassDef, script: Script
) -> cst.ClassDef:
    """`def reset_states(self)` of a metric, which Keras 3 would not call."""
    bases = [script.names.of(base.value) or "" for base in original.bases]
    if any(name.startswith("keras.metrics.") for name in bases):
        for node in original.body.body:
            if isinstance(node, cst.FunctionDef) and node.name.value == "reset_states":
                reason = "Keras 3 does not call reset_states"
                script.left(node.name, reason, "Name it reset_state")
    return updated


def list_arguments(
    original: cst.Call, updated: cst.Call, script: Script
) -> cst.BaseExpression:
    """`compile(sample_weight_mode="temporal")`, `LSTM(8, time_major=True)`."""
    name = script.names.of(original.func)
    if name is not None:
        gone = _ARGUMENTS.get(name, {})
        what = name
    else:
        what = (
            original.func.attr.value if isinstance(original.func, cst.Attribute) else ""
        )
        gone = _OF_METHODS.get(what, {})
    for argument, advice in gone.items():
        if keyword(updated, argument) is not None:
            script.left(original, f"{what} of Keras 3 has no {argument}=", advice)
    return updated
