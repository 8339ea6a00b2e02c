"""Handwritten digits with plain Keras, trained on two processes without a change.

    keras-dist run -np 2 --distribute examples/digits_keras.py

`examples/digits.py` calls `dist_fit` instead.
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
x, x_val, y, y_val = train_test_split(images / 16, labels, random_state=0)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, validation_data=(x_val, y_val), epochs=8, verbose=2)
loss, accuracy = model.evaluate(x_val, y_val, verbose=0)
print(f"validation accuracy {accuracy:.1%}")
