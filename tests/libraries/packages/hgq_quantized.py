"""hgq2: layers that learn the width of their bits, with a loss for the hardware."""

import keras
from hgq.config import LayerConfigScope, QuantizerConfigScope
from hgq.layers import QDense
from hgq.utils.sugar import BetaScheduler, FreeEBOPs, PieceWiseSchedule
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x, y = x[:300] / 16, y[:300]
with (
    QuantizerConfigScope(default_q_type="kif", overflow_mode="SAT_SYM"),
    QuantizerConfigScope(place="datalane", default_q_type="kif", overflow_mode="WRAP"),
    LayerConfigScope(enable_ebops=True, beta0=1e-5),
):
    layers = [keras.Input((64,)), QDense(8, activation="relu"), QDense(10)]
    model = keras.Sequential(layers)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
schedule = BetaScheduler(
    PieceWiseSchedule([(0, 1e-6, "linear"), (2, 1e-4, "constant")])
)
callbacks = [schedule, FreeEBOPs()]
model.fit(x, y, batch_size=50, epochs=3, verbose=0, callbacks=callbacks)
print("evaluated", model.evaluate(x, y, verbose=0))
weights = [variable.numpy() for variable in model.trainable_variables]
for weight in weights:
    print("weights", *weight.ravel())
