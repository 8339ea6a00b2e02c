"""A script after `keras-dist migrate --to dist_fit` gives the numbers of Horovod's."""

import keras
import numpy as np
import pytest
from claims import shortened

from keras_dist.tools.migrate import fit, source

HEAD = """\
import keras
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
x = np.random.RandomState(0).normal(size=(48, 5)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
x_val, y_val = x[:24] * 2, y[:24]
net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh")])
net.add(keras.layers.Dense(1))
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
"""

SCRIPTS = {
    "arrays, a scaled rate, all validation rows": """
opt = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size()))
net.compile(opt, "mse", ["mae"], run_eagerly=True)
history = net.fit(
    x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()], batch_size=8, epochs=3,
    shuffle=False, validation_data=(x_val, y_val), callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
score = net.evaluate(x_val, y_val, verbose=0)
""",
    "names, momentum, sharded validation, a sum of gradients": """
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
x_val, y_val = x_val[hvd.rank() :: hvd.size()], y_val[hvd.rank() :: hvd.size()]
opt = keras.optimizers.SGD(lr=0.01, momentum=0.9, nesterov=True, clipnorm=1.0)
opt = hvd.DistributedOptimizer(opt, op=hvd.Sum)
net.compile(optimizer=opt, loss="mse", metrics=["mae"], run_eagerly=True)
callbacks.append(keras.callbacks.EarlyStopping("val_loss", patience=1))
history = net.fit(
    x, y, batch_size=8, epochs=4, shuffle=False, validation_data=(x_val, y_val),
    callbacks=callbacks, verbose=0,
)
""",
    "a data set, a scaled rate with decay of weights, steps": """
rate = 0.02 * hvd.size()
data = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
data = data.map(lambda a, b: (a * 2, b)).batch(4)
opt = hvd.DistributedOptimizer(keras.optimizers.AdamW(rate, weight_decay=0.1))
net.compile(opt, "mse", metrics=["mae"], run_eagerly=True)
steps = len(y) // (4 * hvd.size())
history = net.fit_generator(
    data, steps, 2, validation_data=(x_val, y_val), callbacks=callbacks, verbose=0
)
""",
    "a scaled rate and a sum of gradients, in functions": """
def build(rate):
    opt = keras.optimizers.Adagrad(learning_rate=rate * hvd.size())
    opt = hvd.DistributedOptimizer(opt, op=hvd.Sum)
    net.compile(opt, "mse", metrics=["mae"], run_eagerly=True)
    return net

def train(model, data):
    verbose = 0
    if hvd.rank() == 0:
        verbose = 2
        callbacks.append(keras.callbacks.CSVLogger("/dev/null"))
    return model.fit(
        data.shard(hvd.size(), hvd.rank()), epochs=2, callbacks=callbacks,
        validation_data=(x_val, y_val), verbose=verbose, class_weight=None,
    )

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
history = train(build(0.01), data)
""",
    "all rows on all ranks, odd steps, half precision": """
opt = keras.optimizers.RMSprop(0.01)
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
net.compile(opt, "mse", metrics=["mae"], run_eagerly=True)
model = net
history = model.fit(
    x, y, batch_size=4, epochs=2, shuffle=False, steps_per_epoch=11 // hvd.size(),
    validation_data=(x_val, y_val), validation_steps=3, validation_batch_size=4,
    callbacks=callbacks, verbose=0,
)
""",
}


def _ran(text):
    names = {"__name__": "script"}
    exec(compile(text, "<script>", "exec"), names)
    return names


@pytest.mark.parametrize(
    "script",
    shortened(
        SCRIPTS,
        {
            "arrays, a scaled rate, all validation rows",
            "all rows on all ranks, odd steps, half precision",
        },
    ),
)
def test_a_converted_script_gives_the_numbers_of_horovod(script):
    """Weights, and what it logs; the oracle is the script on `keras_dist.horovod`."""
    text = (HEAD + SCRIPTS[script]).encode()
    plain, whole = source.migrate(text), fit.migrate(text)
    assert plain.is_whole and whole.is_whole, whole.findings
    assert b"dist_fit(" in whole.source and b"hvd" not in whole.source
    expected, found = _ran(plain.source), _ran(whole.source)
    for own, other in zip(found["net"].weights, expected["net"].weights, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(own),
            keras.ops.convert_to_numpy(other),
            rtol=2e-4,
            atol=1e-5,
        )
    logged = expected["history"].history
    for name, values in logged.items():
        np.testing.assert_allclose(
            found["history"].history[name], values, rtol=1e-4, atol=1e-5
        )
    assert {"loss", "val_loss"} <= set(logged)
