"""imbalanced-learn: `BalancedBatchGenerator`, a `PyDataset`."""

import keras
from imblearn.datasets import make_imbalance
from imblearn.keras import BalancedBatchGenerator
from imblearn.under_sampling import NearMiss
from sklearn.datasets import load_iris

keras.utils.set_random_seed(1)
counts = {0: 30, 1: 50, 2: 40}
x, y = make_imbalance(*load_iris(return_X_y=True), sampling_strategy=counts)
y = keras.utils.to_categorical(y, 3)
layers = [keras.Input((4,)), keras.layers.Dense(3, activation="softmax")]
model = keras.Sequential(layers)
model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
batches = BalancedBatchGenerator(
    x, y, sampler=NearMiss(), batch_size=10, random_state=42
)
model.fit(batches, epochs=5, verbose=0)
print("evaluated", model.evaluate(batches, verbose=0))
for weight in model.get_weights():
    print("weights", *weight.ravel())
