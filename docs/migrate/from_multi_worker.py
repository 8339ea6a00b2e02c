"""Handwritten digits on many processes, on one or several hosts."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_dist

batch_size = 32

images, labels = load_digits(return_X_y=True)
x, x_val, y, y_val = train_test_split(images / 16, labels, random_state=0)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000, seed=0)
data = data.batch(batch_size)
data_val = tf.data.Dataset.from_tensor_slices((x_val, y_val))
data_val = data_val.batch(batch_size)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    keras.optimizers.Adam(1e-3),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

keras_dist.dist_fit(
    model,
    data,
    epochs=3,
    validation_data=data_val,
    verbose=2,
)
model.save("digits.keras")
