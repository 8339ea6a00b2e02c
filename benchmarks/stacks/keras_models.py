"""The three models, of whichever Keras the caller has imported as `keras`."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def make(keras, name: str):
    """A model, not compiled, that ends in ten numbers."""
    layers = keras.layers
    if name == "cnn":
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ]
        )
    if name == "mlp":
        return keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(2048, activation="relu"),
                layers.Dense(2048, activation="relu"),
                layers.Dense(10, activation="softmax"),
            ]
        )
    # It imports `keras`: by now that is the caller's.
    example = importlib.import_module("wide_resnet")
    return example.wide_resnet(mean=0.286, variance=0.125, wd=1e-4)


def compile_arguments(optimizer) -> dict:
    """What every Keras stack compiles with."""
    return {
        "optimizer": optimizer,
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "jit_compile": False,
    }


def clock_callback(keras, clock):
    """A callback that times the epochs."""
    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.begin(),
        on_epoch_end=lambda epoch, logs: clock.end(),
    )
