"""A custom train step whose loss compares the rows of the global batch.

    keras-dist run -np 2 examples/train_step.py

Two encoders learn which lower half of a digit belongs to which upper half, by comparing
the rows of a batch. `keras_dist.gather_rows` returns the rows of all ranks, so that the
result is the same as on one process: `python examples/train_step.py`.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_dist

keras.utils.set_random_seed(0)
images, _ = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
upper, lower = images[:, :32] / 16, images[:, 32:] / 16


def encoder():
    """Make an encoder that maps half an image to a vector of length 1."""
    return keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(16),
            keras.layers.UnitNormalization(),
        ]
    )


class Halves(keras.Model):
    """Match the upper halves of a batch with its lower halves."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = encoder(), encoder()

    def call(self, halves):
        """Return the vectors of the upper and of the lower halves."""
        return self.upper(halves[0]), self.lower(halves[1])

    def train_step(self, data):
        """Update once. The correct lower half for row i is in row i."""
        halves, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            # Each rank gathers the rows of all ranks.
            one, two = keras_dist.gather_rows(self(halves, training=True))
            scores = 10.0 * tf.matmul(one, two, transpose_b=True)
            rows = tf.range(tf.shape(scores)[0])
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    rows, scores, from_logits=True
                )
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


model = Halves()
model.compile(keras.optimizers.Adam(3e-3))
history = keras_dist.dist_fit(
    model, (upper, lower), batch_size=128, epochs=8, verbose=2, batch="global"
)
if keras_dist.rank() == 0:
    losses = history.history["loss"]
    print(f"loss {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
