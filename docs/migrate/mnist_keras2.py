"""Handwritten digits by Horovod's recipe for Keras 2. It does not work on Keras 3."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
# One GPU for each rank
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

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
scaled_lr = 0.001 * hvd.size()
opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(lr=scaled_lr))
model.compile(
    optimizer=opt,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    tf.keras.callbacks.EarlyStopping("loss", patience=3),
]
# Checkpoints are written by the first rank only
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.h5"))

model.fit(
    dataset,
    steps_per_epoch=48 // hvd.size(),
    epochs=2,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    model.save_weights("last.h5")
