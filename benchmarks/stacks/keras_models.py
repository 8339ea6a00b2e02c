"""The models, of whichever Keras the caller has imported as `keras`."""

import importlib
import sys
from pathlib import Path

from common import Clock

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def make(keras, name: str):
    """A model, not compiled, that ends in ten numbers."""
    layers = keras.layers
    if name in ("cnn", "dropout"):
        found = [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
        if name == "dropout":
            for place in (7, 5, 3):  # from the end: the last, and after each pooling
                found.insert(place, layers.Dropout(0.2))
        return keras.Sequential(found)
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


def optimizer(keras):
    """SGD with momentum."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


def compile_arguments(optimizer) -> dict:
    """What every Keras stack compiles with."""
    return {
        "optimizer": optimizer,
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "jit_compile": False,
    }


def clock_callback(keras, clock, after_epoch=None):
    """A callback that times the steps, and then lets `after_epoch()` have its turn."""
    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: clock.begin(),
        on_train_batch_end=lambda batch, logs: clock.step(),
        on_epoch_end=lambda epoch, logs: after_epoch() if after_epoch else None,
    )


class Twin:
    """The ceiling: the same model in the same process, without averaging.

    It trains for an epoch after each epoch of the other one, so that both run under the
    same load of the machine.
    """

    def __init__(self, keras, name, rows, own_data, batch_size, barrier):
        self.model = make(keras, name)
        self.model.compile(**compile_arguments(optimizer(keras)))
        self.clock = Clock("twin", name, rows)
        self._callback = clock_callback(keras, self.clock)
        self._data, self._batch_size, self._barrier = own_data, batch_size, barrier

    def turn(self):
        """One epoch, which all ranks begin at the same time."""
        self._barrier()
        x, y = self._data
        self.model.fit(
            x, y, batch_size=self._batch_size, callbacks=[self._callback], verbose=0
        )
        self._barrier()
