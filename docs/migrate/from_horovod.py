"""Handwritten digits on many processes."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_dist

images, labels = load_digits(return_X_y=True)
x, x_val, y, y_val = train_test_split(images / 16, labels, random_state=0)

model = keras.Sequential(
    [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = keras_dist.DistributedOptimizer(
    keras.optimizers.Adam(1e-3), compression="fp16"
)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [keras.callbacks.ModelCheckpoint("digits.keras")]
keras_dist.dist_fit(
    model,
    x,
    y,
    batch_size=32,
    epochs=3,
    validation_data=(x_val, y_val),
    callbacks=callbacks,
    verbose=2,
    warmup_epochs=2,
)
