"""tsgm: a conditional GAN of time series, whose steps draw noise."""

import keras
import numpy as np
import tsgm

keras.utils.set_random_seed(1)
random = np.random.default_rng(1)
labels = random.integers(0, 2, 64)
times = np.linspace(0, 6, 16)[None, :, None]
series = np.sin(times * (1 + labels[:, None, None])) + random.normal(
    0, 0.1, (64, 16, 1)
)
series = tsgm.utils.TSFeatureWiseScaler((0, 1)).fit_transform(series)
generator = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Reshape((16, 1))]
)
layers = [keras.layers.Conv1D(8, 3, strides=2), keras.layers.LeakyReLU(0.2)]
layers += [keras.layers.GlobalAvgPool1D(), keras.layers.Dense(1, "sigmoid")]
discriminator = keras.Sequential([keras.Input((16, 3)), *layers])
model = tsgm.models.cgan.ConditionalGAN(discriminator, generator, latent_dim=4)
model.compile(
    d_optimizer=keras.optimizers.Adam(0.0003),
    g_optimizer=keras.optimizers.Adam(0.0003),
    loss_fn=keras.losses.BinaryCrossentropy(),
)
targets = keras.utils.to_categorical(labels, 2)
model.fit(series.astype("float32"), targets, batch_size=16, epochs=2, verbose=0)
print("made", model.generate(targets[:4]).shape)
for weight in [*discriminator.get_weights(), *generator.get_weights()]:
    print("weights", *weight.ravel())
