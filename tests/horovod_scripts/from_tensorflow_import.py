"""`from keras_dist import horovod as hvd`, and compression to 16 bits."""

from results import record, rows, start
from tensorflow.keras import Sequential
from tensorflow.keras.layers import Dense
from tensorflow.keras.optimizers import SGD

from keras_dist import horovod as hvd

hvd.init()
x, y = rows()
model = Sequential([Dense(3, activation="tanh", input_shape=(4,)), Dense(1)])
start(model)
optimizer = hvd.DistributedOptimizer(
    SGD(learning_rate=0.1), compression=hvd.Compression.fp16
)
model.compile(optimizer, "mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
record(half_precision_weights=model.get_weights())
