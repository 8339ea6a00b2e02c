"""The first rank alone has callbacks, evaluates and saves; the others only train."""

from keras import models
from keras.callbacks import CSVLogger, ModelCheckpoint
from keras.layers import Dense
from keras.optimizers import RMSprop
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = models.Sequential([Dense(1, input_shape=(4,))])
start(model)
model.compile(hvd.DistributedOptimizer(RMSprop(learning_rate=0.01 * hvd.size())), "mse")
callbacks = []
if hvd.rank() == 0:
    callbacks = [
        ModelCheckpoint("best.weights.h5", save_weights_only=True),
        CSVLogger("log.csv"),
    ]
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=2,
    shuffle=False,
    callbacks=callbacks,
    verbose=0,
)
score = None
if hvd.rank() == 0:
    model.save_weights("last.weights.h5")
    score = model.evaluate(x, y, verbose=0)
record(weights=model.get_weights(), score=score)
