"""`sparse_as_dense=True`: the table is sent whole, and Adam moves all its rows."""

import numpy as np
from results import record, start
from tensorflow import keras

import keras_dist.horovod as hvd

hvd.init()
words = np.random.RandomState(3).randint(0, 7, (24, 3))
y = words.sum(axis=1, keepdims=True).astype("float32") / 10
model = keras.Sequential(
    [
        keras.layers.Embedding(7, 2),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
)
model.build((None, 3))
start(model)
opt = hvd.DistributedOptimizer(
    keras.optimizers.Adam(learning_rate=0.01), sparse_as_dense=True
)
model.compile(opt, "mse")
model.fit(
    words[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=4,
    epochs=2,
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
record(weights=model.get_weights())
