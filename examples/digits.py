"""Quick start: handwritten digits on two processes, in seconds, without a download.

    keras-dist run -np 2 examples/digits.py

`horovodrun -np 2 python examples/digits.py` does the same. Without a launcher the
script trains on one process.
"""

import sys

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_dist

TARGET = 0.95

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

history = keras_dist.dist_fit(  # instead of model.fit(
    model,
    x,
    y,
    validation_data=(x_val, y_val),
    epochs=50,
    verbose=2,
    batch="global",  # all processes share batches of 32 rows, as on one process
    target_accuracy=TARGET,
)

accuracy = history.history["val_accuracy"][-1]
if keras_dist.rank() == 0:
    print(f"validation accuracy {accuracy:.1%} after {len(history.epoch)} epochs")
sys.exit(0 if accuracy >= TARGET else 1)
