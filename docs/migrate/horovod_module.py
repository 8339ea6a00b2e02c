"""Handwritten digits with Horovod's Keras module, its import changed."""

import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

import keras_dist.horovod as hvd

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits(return_X_y=True)
x, x_val, y, y_val = train_test_split(images / 16, labels, random_state=0)
rows = len(x) // hvd.size() * hvd.size()
x, y = x[:rows][hvd.rank() :: hvd.size()], y[:rows][hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 1e-3 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.Adam(rate), compression=hvd.Compression.fp16
)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("digits.keras"))
model.fit(
    x,
    y,
    batch_size=32,
    epochs=3,
    validation_data=(x_val, y_val),
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
