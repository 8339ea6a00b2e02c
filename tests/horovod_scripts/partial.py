"""`PartialDistributedOptimizer`: layers whose gradients stay on their rank."""

import keras
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
local = keras.layers.Dense(3)
model = keras.models.Sequential([keras.Input((4,)), local, keras.layers.Dense(1)])
start(model)
opt = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[local])
model.compile(opt, "mse")
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    verbose=0,
)
record(weights=model.get_weights())
