"""Models that generate: their train steps have several networks and losses."""

import keras
import tensorflow as tf
from keras import ops

from harness.keras_ways.data import (
    Tracked,
    floats,
    integers,
    noise_of,
    perceptron,
    square,
)
from harness.keras_ways.way import Registry
from harness.models import Stepping, update

GENERATIVE = Registry("generative")


class Latent(keras.layers.Layer):
    """Draws from a normal distribution; may add its divergence to the losses."""

    def __init__(self, loss=None):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        mean, log_var, x = inputs
        if self.loss is not None:
            self.add_loss(self.loss(divergence(mean, log_var)))
        return mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean))


def divergence(mean, log_var):
    """Of each row's normal distribution from the standard one."""
    return -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=1)


def encoder_with(latent):
    """A functional model of three outputs."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, activation="relu")(inputs)
    mean, log_var = keras.layers.Dense(2)(x), keras.layers.Dense(2)(x)
    return keras.Model(inputs, [mean, log_var, latent([mean, log_var, inputs])])


class VariationalAutoencoder(keras.Model):
    """Trackers of three losses, and means over the rows of sums in each row."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder_with(Latent())
        self.decoder = perceptron(4, 6, inputs=2)
        names = ("loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            gap = ops.sum(ops.square(data - self.decoder(z)), axis=1)
            losses = [ops.mean(gap), ops.mean(divergence(mean, log_var))]
            total = losses[0] + losses[1]
        update(tape, total, self.optimizer, self)
        for tracker, loss in zip(self.trackers, [total, *losses], strict=True):
            tracker.update_state(loss, sample_weight=ops.shape(data)[0])
        return {tracker.name: tracker.result() for tracker in self.trackers}


@GENERATIVE.way("variational autoencoder")
def variational_autoencoder(run):
    model = run.compile(VariationalAutoencoder(), keras.optimizers.Adam(0.01))
    return model, run.fit(model, floats(6))


# Decorators are applied from the last to the first, which is the order of the ways.
@GENERATIVE.way(
    "variational autoencoder with add_loss of one value a row", lambda values: values
)
@GENERATIVE.way("variational autoencoder with add_loss of a sum", ops.sum)
@GENERATIVE.way(
    "variational autoencoder with add_loss of a mean", ops.mean, is_traced=True
)
def autoencoder_with_loss(run, loss):
    encoder = encoder_with(Latent(lambda values: 0.1 * loss(values)))
    decoder = perceptron(4, 6, inputs=2)
    model = keras.Model(encoder.inputs, decoder(encoder.outputs[2]))
    run.compile(model, keras.optimizers.SGD(0.02), "mse")
    x = floats(6)
    return model, run.fit(model, x, x)


class Gan(keras.Model):
    """A discriminator that learns with labels, then a generator that misleads it."""

    def __init__(self):
        super().__init__()
        self.generator = perceptron(4, 3, inputs=2)
        self.discriminator = perceptron(4, 1, inputs=3)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, hold, **how):
        """`hold` keeps both optimizers, and returns a function that reads them."""
        super().compile(**how)
        d_optimizer = keras.optimizers.Adam(0.01, beta_1=0.5, epsilon=1e-3)
        g_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self.read = hold(self, d_optimizer, g_optimizer)

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data):
        bce = keras.losses.BinaryCrossentropy(from_logits=True)
        d_optimizer, g_optimizer = self.read()
        noise = keras.random.normal((ops.shape(data)[0], 2))
        rows = ops.shape(data)[0]
        both = ops.concatenate([self.generator(noise), data], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * noise_of(both, 1)
        with tf.GradientTape() as tape:
            d_loss = bce(labels, self.discriminator(both))
        update(tape, d_loss, d_optimizer, self.discriminator)
        with tf.GradientTape() as tape:
            scores = self.discriminator(self.generator(noise))
            g_loss = bce(ops.zeros((rows, 1)), scores)
        update(tape, g_loss, g_optimizer, self.generator)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def _as_attributes(model, d_optimizer, g_optimizer):
    model.d_optimizer, model.g_optimizer = d_optimizer, g_optimizer
    return lambda: (model.d_optimizer, model.g_optimizer)


def _in_list(model, d_optimizer, g_optimizer):
    model.optimizers = [d_optimizer, g_optimizer]
    return lambda: model.optimizers


def _in_dict(model, d_optimizer, g_optimizer):
    model.optimizers = {"d": d_optimizer, "g": g_optimizer}
    return lambda: (model.optimizers["d"], model.optimizers["g"])


@GENERATIVE.way("GAN with two optimizers in a dict", _in_dict)
@GENERATIVE.way("GAN with two optimizers in a list", _in_list)
@GENERATIVE.way("GAN with two optimizers as attributes", _as_attributes, is_traced=True)
def gan(run, hold):
    model = run.compile(Gan(), hold)
    # Trackers count a step as one, so that logs are equal where steps are equally long.
    history = run.fit(model, floats(3, rows=24))
    return model.generator, model.discriminator, model.read(), history


class ConditionalGan(keras.Model):
    """One class a row beside the noise and the sample; data of known pairs."""

    def __init__(self):
        super().__init__()
        self.generator = perceptron(4, 3, inputs=5)
        self.discriminator = perceptron(4, 1, inputs=6)

    def call(self, inputs):
        return self.generator(inputs)

    def train_step(self, data):
        x, label = data
        classes = ops.one_hot(label, 3, dtype=x.dtype)
        bce = keras.losses.BinaryCrossentropy(from_logits=True)
        latent = keras.random.normal((ops.shape(x)[0], 2))
        noise = ops.concatenate([latent, classes], axis=1)
        rows = ops.shape(x)[0]
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(noise)
            fake = self.discriminator(ops.concatenate([made, classes], axis=1))
            real = self.discriminator(ops.concatenate([x, classes], axis=1))
            ones, zeros = ops.ones((rows, 1)), ops.zeros((rows, 1))
            d_loss = bce(ones, real) + bce(zeros, fake)
            g_loss = bce(ones, fake)
        update(tape, d_loss, self.d_optimizer, self.discriminator)
        update(tape, g_loss, self.g_optimizer, self.generator)
        return {"d_loss": d_loss, "g_loss": g_loss}


@GENERATIVE.way("conditional GAN, one tape for both losses")
def conditional_gan(run):
    model = ConditionalGan()
    model.d_optimizer = keras.optimizers.RMSprop(0.01)
    model.g_optimizer = keras.optimizers.Adam(0.01)
    run.compile(model)
    history = run.fit(model, run.batches(floats(3), integers(3)))
    return model.weights, model.d_optimizer, model.g_optimizer, history


class WassersteinGan(keras.Model):
    """Several steps of the critic for one of the generator, and a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.generator = perceptron(4, 3, inputs=2)
        self.critic = perceptron(4, 1, inputs=3)

    def penalty(self, real, fake):
        mixed = real + keras.random.uniform((ops.shape(real)[0], 1)) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = self.critic(mixed)
        gradients = tape.gradient(scores, mixed)
        norms = ops.sqrt(ops.sum(ops.square(gradients), axis=1) + 1e-12)
        return ops.mean(ops.square(norms - 1))

    def train_step(self, data):
        noise = keras.random.normal((ops.shape(data)[0], 2))
        for step in range(3):
            with tf.GradientTape() as tape:
                fake = self.generator(noise + 0.1 * step)
                loss = ops.mean(self.critic(fake)) - ops.mean(self.critic(data))
                loss += 10 * self.penalty(data, fake)
            update(tape, loss, self.c_optimizer, self.critic)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.critic(self.generator(noise)))
        update(tape, g_loss, self.g_optimizer, self.generator)
        return {"c_loss": loss, "g_loss": g_loss}


@GENERATIVE.way("WGAN-GP with several critic steps")
def wasserstein_gan(run):
    model = WassersteinGan()
    model.c_optimizer = keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9)
    model.g_optimizer = keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9)
    run.compile(model)
    history = run.fit(model, floats(3))
    return model.weights, model.c_optimizer, model.g_optimizer, history


class CycleGan(keras.Model):
    """Two generators and two discriminators with an optimizer each, and one tape."""

    def __init__(self):
        super().__init__()
        self.to_y = perceptron(4, 3, inputs=3)
        self.to_x = perceptron(4, 3, inputs=3)
        self.of_x = perceptron(3, 1, inputs=3)
        self.of_y = perceptron(3, 1, inputs=3)

    def compile(self, optimizers, **how):
        super().compile(**how)
        self.g_optimizer, self.f_optimizer, self.x_optimizer, self.y_optimizer = (
            optimizers
        )

    def train_step(self, data):
        x, y = data
        mae = keras.losses.MeanAbsoluteError()
        mse = keras.losses.MeanSquaredError()
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to_y(x, training=True), self.to_x(y, training=True)
            back = mae(x, self.to_x(fake_y)) + mae(y, self.to_y(fake_x))
            same = mae(y, self.to_y(y)) + mae(x, self.to_x(x))
            score_x, score_y = self.of_x(fake_x), self.of_y(fake_y)
            g_loss = mse(ops.ones_like(score_y), score_y) + back + 0.5 * same
            f_loss = mse(ops.ones_like(score_x), score_x) + back + 0.5 * same
            x_loss = mse(ops.ones_like(score_x), self.of_x(x))
            x_loss += mse(ops.zeros_like(score_x), score_x)
            y_loss = mse(ops.ones_like(score_y), self.of_y(y))
            y_loss += mse(ops.zeros_like(score_y), score_y)
        for loss, optimizer, model in (
            (g_loss, self.g_optimizer, self.to_y),
            (f_loss, self.f_optimizer, self.to_x),
            (x_loss, self.x_optimizer, self.of_x),
            (y_loss, self.y_optimizer, self.of_y),
        ):
            update(tape, loss, optimizer, model)
        return {"G_loss": g_loss, "F_loss": f_loss, "X_loss": x_loss, "Y_loss": y_loss}


@GENERATIVE.way("CycleGAN: four models, four optimizers")
def cycle_gan(run):
    optimizers = [keras.optimizers.Adam(0.01, beta_1=0.5) for _ in range(4)]
    model = run.compile(CycleGan(), optimizers)
    pairs = run.batches(floats(3)), run.batches(floats(3, seed=1))
    history = run.fit(model, tf.data.Dataset.zip(pairs))
    return model.weights, optimizers, history


class Diffusion(Tracked):
    """Removes noise; another network follows by a moving average of the weights."""

    def __init__(self):
        super().__init__("n_loss")
        self.normalizer = keras.layers.Normalization()
        self.network = perceptron(5, 4, inputs=5)
        self.ema_network = keras.models.clone_model(self.network)

    def loss_of(self, images, network, noises, times):
        images = self.normalizer(images)
        angles = 0.2 + 1.2 * times
        noisy = ops.cos(angles) * images + ops.sin(angles) * noises
        found = network(ops.concatenate([noisy, times], axis=1))
        return self.loss(noises, found)

    def train_step(self, images):
        noises = keras.random.normal(ops.shape(images))
        times = keras.random.uniform((ops.shape(images)[0], 1))
        with tf.GradientTape() as tape:
            loss = self.loss_of(images, self.network, noises, times)
        update(tape, loss, self.optimizer, self.network)
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, ema in pairs:
            ema.assign(0.9 * ema + 0.1 * weight)
        return self.track(loss, images)

    def test_step(self, images):
        noises = noise_of(images, 4), ops.square(noise_of(images, 1))
        return self.track(self.loss_of(images, self.ema_network, *noises), images)


@GENERATIVE.way("diffusion with a moving average of the weights", is_traced=True)
def diffusion(run):
    x = 3 + 2 * floats(4)
    model = Diffusion()
    model.normalizer.adapt(x)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01)
    run.compile(model, optimizer, keras.losses.MeanAbsoluteError())
    return model, run.fit(model, x, validation_data=x[:9])


class Quantizer(keras.layers.Layer):
    """The nearest entry of a codebook, through which the gradient passes."""

    def build(self, shape):
        self.codebook = self.add_weight(shape=(2, 5), initializer="uniform")

    def call(self, x):
        distances = (
            ops.sum(x**2, axis=1, keepdims=True)
            + ops.sum(self.codebook**2, axis=0)
            - 2 * ops.matmul(x, self.codebook)
        )
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 5, dtype=x.dtype)
        found = ops.matmul(chosen, ops.transpose(self.codebook))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(found - x)


class QuantizedTrainer(Tracked):
    """A train step that adds the losses of the layers to its own."""

    def __init__(self):
        super().__init__()
        self.vqvae = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, activation="relu"),
                keras.layers.Dense(2),
                Quantizer(),
                keras.layers.Dense(6),
            ]
        )

    def loss_of(self, x):
        gap = ops.mean((x - self.vqvae(x)) ** 2) / 0.7
        return gap + sum(self.vqvae.losses)

    def train_step(self, x):
        return super().train_step(x) | {"vqvae_loss": sum(self.vqvae.losses)}


@GENERATIVE.way("VQ-VAE with a codebook", is_traced=True)
def quantized_autoencoder(run):
    model = run.compile(QuantizedTrainer(), keras.optimizers.Adam(0.01))
    return model, run.fit(model, floats(6))


class Flow(Stepping):
    """Coupling layers whose likelihood of the rows is a loss of the model itself."""

    def __init__(self):
        super().__init__()
        self.scales = [perceptron(4, 2, inputs=2) for _ in range(2)]
        self.shifts = [perceptron(4, 2, inputs=2) for _ in range(2)]

    def call(self, x):
        log_det = ops.zeros((ops.shape(x)[0],), dtype=x.dtype)
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            kept, changed = x[:, :2], x[:, 2:]
            s = ops.tanh(scale(kept))
            changed = changed * ops.exp(s) + shift(kept)
            x = ops.concatenate([changed, kept], axis=1)
            log_det += ops.sum(s, axis=1)
        return x, log_det

    def loss_of(self, x):
        z, log_det = self(x)
        return -ops.mean(-0.5 * ops.sum(z**2, axis=1) + log_det)

    def test_step(self, x):
        return {"loss": self.loss_of(x)}


@GENERATIVE.way("normalizing flow")
def flow(run):
    model = run.compile(Flow(), keras.optimizers.Adam(0.01))
    return model, run.fit(model, floats(4))


@GENERATIVE.way("convolutional autoencoder of pictures", is_traced=True)
def convolutional_autoencoder(run):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(2, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
            keras.layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
        ]
    )
    run.compile(model, "adam", "binary_crossentropy")
    x = 1 / (1 + ops.convert_to_numpy(ops.exp(-floats(6, 6, 1))))
    return model, run.fit(model, x, x, validation_split=0.09)


class Painter(Stepping):
    """Losses of each row from a user's function, averaged by hand."""

    def __init__(self):
        super().__init__()
        self.network = perceptron(4, 4, inputs=4)

    def call(self, x):
        return self.network(x)

    def loss_of(self, data):
        return ops.mean(square(self(data) - keras.random.normal(ops.shape(data))))


@GENERATIVE.way("score matching, one data set of endless batches")
def painter(run):
    model = run.compile(Painter(), keras.optimizers.Lion(0.001))
    data = tf.data.Dataset.from_tensor_slices(floats(4, rows=24))
    data = data.batch(run.batch_size, drop_remainder=True).repeat()
    return model, run.fit(model, data, steps_per_epoch=run.steps(2))
