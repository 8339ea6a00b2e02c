"""Handwritten digits by `dist_fit`."""

import keras_dist
import tensorflow as tf
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.repeat().shuffle(2000).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

# The rate grows with the number of ranks
scaled_lr = 0.001
opt = tf.keras.optimizers.Adam(learning_rate=scaled_lr)
model.compile(
    optimizer=opt,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

callbacks = [
    tf.keras.callbacks.EarlyStopping("loss", patience=3),
]
# Checkpoints are written by the first rank only
callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))

keras_dist.dist_fit(
    model,
    dataset,
    steps_per_epoch=48 // keras_dist.size(),
    epochs=2,
    callbacks=callbacks,
    verbose=2,
    steps_scaling="none",
    shard="none",
)
if keras_dist.rank() == 0:
    model.save_weights("last.weights.h5")
