"""ResNet's schedule: warm-up, then the rate is divided at certain epochs."""

import keras
from results import record, rows, start

import keras_dist.horovod as hvd

hvd.init()
x, y = rows()
model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(4,))])
start(model)
initial_lr = 0.05 * hvd.size()
opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.5)
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="mse", optimizer=opt, metrics=["mae"])
schedule = hvd.callbacks.LearningRateScheduleCallback
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial_lr, warmup_epochs=2),
    schedule(initial_lr=initial_lr, multiplier=1.0, start_epoch=2, end_epoch=3),
    schedule(initial_lr=initial_lr, multiplier=1e-1, start_epoch=3, end_epoch=5),
    schedule(initial_lr=initial_lr, multiplier=1e-2, start_epoch=5),
]
history = model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=8,
    epochs=7,
    shuffle=False,
    verbose=0,
    callbacks=callbacks,
)
record(weights=model.get_weights(), logs=history.history)
