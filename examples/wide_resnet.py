"""A wide residual network for images of 28 × 28 pixels in ten classes."""

import keras
from keras import layers

BLOCKS = 1  # residual blocks in each of the three stages
DROPOUT = 0.01
SHIFT = 2  # largest shift of an image, in pixels


def wide_resnet(*, mean: float, variance: float, width: int = 1, wd: float = 0.0):
    """Make the network (Zagoruyko and Komodakis, 2016, arXiv:1605.07146).

    Images are flipped and shifted at random in the model itself.

    Args:
        mean, variance: Mean and variance of the pixels of the training images.
        width: Multiplies the channels of the three stages, 16, 32 and 64.
        wd: Weight decay: the L2 penalty on all kernels.
    """
    inputs = keras.Input((28, 28, 1))
    x = layers.RandomFlip("horizontal")(inputs)
    x = layers.RandomTranslation(
        SHIFT / 28, SHIFT / 28, fill_mode="constant", interpolation="nearest"
    )(x)
    x = layers.Normalization(axis=None, mean=mean, variance=variance)(x)
    x = convolution(x, 16, 3, wd)
    for stage, channels in enumerate((16 * width, 32 * width, 64 * width)):
        if stage > 0:
            x = layers.MaxPooling2D()(x)
        for _ in range(BLOCKS):
            x = residual_block(x, channels, wd)
    x = layers.GlobalAveragePooling2D()(activation(x))
    penalty = keras.regularizers.L2(wd)
    outputs = layers.Dense(10, activation="softmax", kernel_regularizer=penalty)(x)
    return keras.Model(inputs, outputs, name="wide_resnet")


def residual_block(x, channels: int, wd: float):
    """Two convolutions, each preceded by its activation, plus the input."""
    active = activation(x)
    y = convolution(active, channels, 3, wd)
    y = layers.Dropout(DROPOUT)(activation(y))
    y = convolution(y, channels, 3, wd)
    if x.shape[-1] != channels:
        x = convolution(active, channels, 1, wd)
    return layers.Add()([x, y])


def activation(x):
    """Batch normalization, then ReLU."""
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))


def convolution(x, channels: int, kernel_size: int, wd: float):
    """A convolution without bias: a batch normalization follows."""
    return layers.Conv2D(
        channels,
        kernel_size,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(wd),
    )(x)
