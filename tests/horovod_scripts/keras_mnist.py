"""Adadelta, and an average of the score."""

import keras
from keras.layers import Dense
from keras.models import Sequential
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()

x, y = rows(48, classes=2)
y = keras.utils.to_categorical(y, 2)

model = Sequential()
model.add(Dense(6, activation="relu", input_shape=(4,)))
model.add(Dense(2, activation="softmax"))
start(model)

opt = keras.optimizers.Adadelta(learning_rate=1.0 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(
    loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"]
)

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

mine = slice(hvd.rank(), None, hvd.size())
history = model.fit(
    x[mine],
    y[mine],
    batch_size=8,
    callbacks=callbacks,
    epochs=2,
    shuffle=False,
    verbose=1 if hvd.rank() == 0 else 0,
    validation_data=(x, y),
)
score = model.evaluate(x[mine], y[mine], verbose=0)
record(
    weights=model.get_weights(),
    logs=history.history,
    score=score,
    mean=hvd.allreduce(score[1], name="accuracy"),
)
