"""umap-learn: `ParametricUMAP`, without negatives."""

import keras
from sklearn.datasets import load_digits
from umap.parametric_umap import ParametricUMAP

keras.utils.set_random_seed(1)
encoder = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
)
x = load_digits().data[:120].astype("float32") / 16
model = ParametricUMAP(
    encoder=encoder,
    n_neighbors=5,
    n_epochs=10,
    batch_size=64,
    negative_sample_rate=0,
    random_state=1,
    n_jobs=1,
    verbose=False,
    keras_fit_kwargs={"verbose": 0},
)
model.loss_report_frequency = 2
print("embedded", model.fit_transform(x).mean())
for weight in model.encoder.get_weights():
    print("weights", *weight.ravel())
