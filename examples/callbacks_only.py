"""A script that calls `model.fit` itself, with the callbacks of keras_dist.

    keras-dist run -np 2 examples/callbacks_only.py

`dist_fit` does all of this in one call. Here every part is visible and optional.
`horovodrun -np 2 python examples/callbacks_only.py` also starts the script.
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_dist

keras.utils.set_random_seed(0)
rank, size = keras_dist.rank(), keras_dist.size()


def shard(rows):
    """Return every `size`-th row, starting at `rank`; equally many on every rank."""
    return rows[: len(rows) // size * size][rank::size]


images, labels = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
split = train_test_split(images / 16, labels, random_state=0)
x, x_val, y, y_val = (shard(rows) for rows in split)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    # Averages the gradients of all ranks before each update.
    keras_dist.DistributedOptimizer(keras.optimizers.Adam()),
    "sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

callbacks = [
    # Computes metrics of all rows. First, because other callbacks read them.
    keras_dist.MetricAverage(),
    # Measures the rows per second of all ranks.
    keras_dist.Throughput(),
    # Raises the learning rate over two epochs, up to rate × number of ranks.
    keras_dist.LearningRateWarmup(warmup_epochs=2),
    # Stops all ranks after the same epoch.
    keras_dist.StopAtAccuracy(0.95),
    # Broadcasts the first rank's weights before the first step. Must be last.
    keras_dist.BroadcastVariables(),
]

model.fit(
    x,
    y,
    validation_data=(x_val, y_val),
    epochs=50,
    callbacks=callbacks,
    verbose=2 if rank == 0 else 0,
)
