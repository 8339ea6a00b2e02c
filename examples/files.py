"""Images in files, by `tf.data`: each is read and decoded on one rank only.

    keras-dist run -np 2 examples/files.py digits

`keras_dist.shard` comes before the `map` that decodes. With `batch="global"`, the
result is the same as on one process: `python examples/files.py digits`.
"""

import sys

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_dist

FOLDER = sys.argv[1]
BATCH = 64  # rows of the global batch

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
paths = np.array([f"{FOLDER}/{row}.png" for row in range(len(images))])

with keras_dist.first_rank() as is_first:  # the other ranks wait for the files
    if is_first:
        tf.io.gfile.makedirs(FOLDER)
        for path, image in zip(paths, images.reshape(-1, 8, 8, 1), strict=True):
            tf.io.write_file(path, tf.io.encode_png((image * 15).astype("uint8")))


def decode(path, label):
    """Read and decode one image. The ranks divide this work."""
    picture = tf.io.decode_png(tf.io.read_file(path), channels=1)
    return tf.cast(picture, "float32") / 255.0, label


def dataset(rows, shuffle):
    """Return this rank's batches of the files and labels of some rows."""
    data = tf.data.Dataset.from_tensor_slices((paths[rows], labels[rows]))
    if shuffle:
        data = data.shuffle(2000, seed=0)  # with a seed, all ranks use one order
    data = data.apply(keras_dist.shard(BATCH, batch="global"))
    data = data.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(keras_dist.local_batch_size(BATCH)).prefetch(2)


model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

history = keras_dist.dist_fit(
    model,
    dataset(slice(0, 1400), shuffle=True),
    validation_data=dataset(slice(1400, None), shuffle=False),
    epochs=4,
    verbose=2,
    batch="global",
)
if keras_dist.rank() == 0:
    print(f"validation loss {history.history['val_loss'][-1]:.4f}")
