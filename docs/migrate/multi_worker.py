"""Handwritten digits on two hosts, for Keras 2: it does not work on Keras 3."""

import json
import os
import sys

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

index = int(sys.argv[1])  # 0 on host a, 1 on host b
workers = ["a:12345", "b:12345"]
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
batch_size = 32 * len(workers)

images, labels = load_digits(return_X_y=True)
x, x_val, y, y_val = train_test_split(images / 16, labels, random_state=0)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = (
    tf.data.experimental.AutoShardPolicy.DATA
)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000, seed=0)
data = data.batch(batch_size).repeat().with_options(options)
data_val = tf.data.Dataset.from_tensor_slices((x_val, y_val))
data_val = data_val.batch(batch_size).with_options(options)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3 * len(workers)),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

model.fit(
    data,
    epochs=3,
    steps_per_epoch=len(x) // batch_size,
    validation_data=data_val,
    verbose=2 if index == 0 else 0,
)
# All workers have to save, each to a file of its own.
model.save("digits.keras" if index == 0 else f"unused.{index}.keras")
