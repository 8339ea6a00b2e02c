"""Horovod's recipe: pinned GPUs, scaled rate, fewer steps, three callbacks."""

import tensorflow as tf
from results import record, rows, start

import keras_dist.horovod as hvd

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

x, y = rows(64, classes=3)
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.repeat().shard(hvd.size(), hvd.rank()).batch(8)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(5, activation="relu", input_shape=(4,)),
        tf.keras.layers.Dense(3, activation="softmax"),
    ]
)
start(model)

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = 0.001 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(
    opt, backward_passes_per_step=1, average_aggregated_gradients=True
)

# Horovod: Specify `experimental_run_tf_function=False` to ensure TensorFlow
# uses hvd.DistributedOptimizer() to compute gradients.
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
)

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: using `lr = 1.0 * hvd.size()` from the very beginning leads to worse
    # final accuracy.
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=scaled_lr, warmup_epochs=2, verbose=1
    ),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting
# them.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

# Horovod: write logs on worker 0.
verbose = 2 if hvd.rank() == 0 else 0

# Train the model. Horovod: adjust number of steps based on number of GPUs.
history = model.fit(
    dataset,
    steps_per_epoch=8 // hvd.size(),
    callbacks=callbacks,
    epochs=3,
    verbose=verbose,
)
record(weights=model.get_weights(), logs=history.history)
