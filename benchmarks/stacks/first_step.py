"""A small fit, which prints when its first step has ended; see growth_start.py."""

import os
import time

import keras
import numpy as np


class Mark(keras.callbacks.Callback):
    """Prints the time after the first step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            print(f"measured: {time.time():.3f}", flush=True)


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
x = np.ones((16, 8), "float32")
options = {"batch_size": 8, "verbose": 0, "callbacks": [Mark()]}
if os.environ["IS_PLAIN"] == "1":
    model.fit(x, x[:, :1], **options)
else:
    import keras_dist

    keras_dist.dist_fit(model, x, x[:, :1], batch="global", **options)
