"""Private names of Keras and TensorFlow are in one file, and in what is installed."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import keras_dist
from keras_dist import private

PACKAGE = Path(keras_dist.__file__).parent
FILE = Path(private.__file__)
FILES = sorted(set(PACKAGE.rglob("*.py")) - {FILE})

# Attributes of Python's own modules.
OTHERS = {
    "argparse._SubParsersAction",
    "known._actions",  # of an `ArgumentParser`
    "libc._exit",
    "os._exit",
    "sys._current_frames",
    "sys._getframe",
}

# Texts that Keras has as names: an attribute of an operation, and ends of names.
TEXT = {"_built", "_class", "_step"}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_(?!keras_dist)[A-Za-z]\w*", name))


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def names_used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Private attributes and texts, with the code of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, ast.unparse(node)
        elif isinstance(node, ast.Constant) and is_private(str(node.value)):
            yield str(node.value), repr(node.value)


def names_of_keras() -> set[str]:
    """All private names in the source of the installed Keras."""
    files = (Path(keras.__file__).parent / "src").rglob("*.py")
    return set(
        re.findall(r"(?<!\w)_[A-Za-z]\w*", "\n".join(f.read_text() for f in files))
    )


def test_private_names_of_keras_are_in_one_file():
    """Everywhere else a private name is one that this package has defined."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    ours = set().union(*map(own_names, trees.values()))
    of_keras = names_of_keras()
    for path, tree in trees.items():
        known = own_names(tree) | (ours - of_keras)
        for name, code in names_used(tree):
            if code[0] in "'\"":
                is_foreign = name in of_keras and name not in TEXT
            elif code == f"self.{name}":
                is_foreign = name not in known
            else:
                is_foreign = code not in OTHERS and name not in ours - of_keras
            assert not is_foreign or name in private.OVERRIDDEN, (
                f"{path.relative_to(PACKAGE)}: {code} is a private name of another "
                "library. Add a function for it to keras_dist/private.py."
            )


@pytest.fixture(scope="module")
def objects() -> dict[str, object]:
    """For each private name, an object of the installed Keras or TensorFlow with it."""
    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.layers.Input((1,)), layer])
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"])
    optimizer.build(model.trainable_variables)
    rmsprop = keras.optimizers.RMSprop(momentum=0.5)
    rmsprop.build(model.trainable_variables)
    keras.utils.set_random_seed(1)
    numbers = tf.data.Dataset.range(4)
    shuffled = numbers.shuffle(4)
    normalization = keras.layers.BatchNormalization()
    normalization.build((None, 1))
    masked = keras.layers.Masking()(tf.zeros((1, 1, 1)))
    of_model = (
        "_aggregate_additional_loss",
        "_clear_losses",
        "_compile_loss",
        "_compile_metrics",
        "_flatten_layers",
        "_get_metrics_result_or_logs",
        "_initial_epoch",
        "_symbolic_build",
    )
    of_optimizer = (
        "_accumulated_gradients",
        "_get_variable_index",
        "_iterations",
        "_learning_rate",
        "_trainable_variables",
    )
    return {
        **dict.fromkeys(of_model, model),
        **dict.fromkeys(of_optimizer, optimizer),
        "_active_context": private._cancellation(),
        "_batch_size": numbers.batch(2),
        "_filename": numbers.cache(),
        "_flat_losses": model._compile_loss,
        "_fn": keras.metrics.MeanSquaredError(),
        "_fn_kwargs": keras.metrics.MeanSquaredError(),
        "_get_control_flow_context": tf.Graph(),
        "_impl": private._cancellation().CancellationManager(),
        "_initialized": private._eager(),
        "_functions": numbers,
        "_inputs": numbers.cache(),
        "_keras_logits": keras.activations.softmax(keras.ops.ones((1, 2))),
        "_keras_mask": masked,
        "_metrics": keras.metrics.Mean(),
        "_model": keras.callbacks.Callback(),
        "_moments": normalization,
        "_momentums": rmsprop,
        "_reduction_axes": normalization,
        "_rerandomize": tf.data.Dataset.random(seed=1),
        "_reshuffle_each_iteration": shuffled,
        "_rng": tf.random.set_seed.__globals__["context"].context(),
        "_seed": shuffled,
        "_seed2": shuffled,
        "_user_metrics": model._compile_metrics,
        "_user_weighted_metrics": model._compile_metrics,
        "_use_cached_eval_dataset": inspect.getsource(model.evaluate),
    }


NAMES = sorted(
    {name for name, _ in names_used(ast.parse(FILE.read_text()))}
    | {*private.OVERRIDDEN}
)


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_in_the_installed_keras(name, objects):
    """A release of Keras without it fails here, by name, and not in a training."""
    found = objects[name]
    has_name = name in found if isinstance(found, str) else hasattr(found, name)
    assert has_name, (
        f"Keras {keras.__version__} with TensorFlow {tf.__version__} has no {name} in "
        f"{type(found).__name__}. keras_dist/private.py needs another way."
    )
