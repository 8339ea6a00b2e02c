import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_dist

images, labels = load_digits(return_X_y=True)  # pip install scikit-learn
images = images.astype("float32") / 16
x, x_val = images[:384], images[384:480]
y, y_val = labels[:384], labels[384:480]


def make_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])


model = make_model()
model.compile(
    keras.optimizers.Adam(1e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
