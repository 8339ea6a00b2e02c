"""A train step of your own, whose loss compares the rows of the whole batch.

    keras-dist run -np 2 examples/train_step.py

Which lower half belongs to which upper half of a digit? Two encoders learn it from the
other rows of the batch. `keras_dist.gather_rows` gives the step the rows of all ranks,
so that the result is that of one process: `python examples/train_step.py`.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_dist

keras.utils.set_random_seed(0)
images, _ = load_digits(return_X_y=True)  # 1,797 rows of 8 × 8 pixels, 0 to 16
upper, lower = images[:, :32] / 16, images[:, 32:] / 16


def encoder():
    """From a half to a vector of length 1."""
    return keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(16),
            keras.layers.UnitNormalization(),
        ]
    )


class Halves(keras.Model):
    """Scores of all upper halves with all lower halves of a batch."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = encoder(), encoder()

    def call(self, halves):
        """Vectors of the upper and of the lower halves."""
        return self.upper(halves[0]), self.lower(halves[1])

    def train_step(self, data):
        """One update: the right lower half of row i is the one of row i."""
        halves, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            # One process has all rows; with several ranks, each gathers them.
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
