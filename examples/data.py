"""Fashion-MNIST as arrays: 60,000 rows to train on and 10,000 to validate on."""

import gzip
from pathlib import Path

import keras
import numpy as np

# The folder of Debian's package dataset-fashion-mnist.
FOLDER = Path("/usr/share/datasets/fashion-mnist")


def load_fashion_mnist(rows: int | None = None):
    """Read Fashion-MNIST from disk, or download it if it is not installed.

    Args:
        rows: Use only the first `rows` rows of each of the two sets.

    Returns:
        `(x, y), (x_val, y_val)`: images of shape (rows, 28, 28, 1) with values 0 to
        255, and labels 0 to 9.

    Raises:
        RuntimeError: If it is not installed and cannot be downloaded.
    """
    if FOLDER.is_dir():
        arrays = [
            read_idx(FOLDER / f"{part}-{kind}-ubyte.gz")
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        ]
    else:
        arrays = download()
    x, y, x_val, y_val = (array[:rows] for array in arrays)
    return (x[..., np.newaxis], y), (x_val[..., np.newaxis], y_val)


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped IDX file of bytes.

    The file has four bytes, the last of which is the number of axes; the length of each
    axis, as a big-endian number of four bytes; and the values.
    """
    content = gzip.decompress(path.read_bytes())
    num_axes = content[3]
    shape = np.frombuffer(content, ">i4", count=num_axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def download() -> list[np.ndarray]:
    """Download the same arrays with Keras, which stores them in ~/.keras/datasets."""
    try:
        (x, y), (x_val, y_val) = keras.datasets.fashion_mnist.load_data()
    except Exception as error:  # Keras has no class for a failed download
        raise RuntimeError(
            f"Fashion-MNIST is neither in {FOLDER} nor can it be downloaded. "
            f"Received: {error}. Install Debian's package dataset-fashion-mnist, or "
            "run examples/digits.py, which needs no download."
        ) from None  # the message names the cause
    return [x, y, x_val, y_val]
