"""What is known of data that comes in batches: data sets, sequences, generators."""

from typing import Any

import keras
import tensorflow as tf


def known_steps(data: Any) -> int | None:
    """Batches in one pass over `data`, or `None` where nobody can say.

    Args:
        data: A `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, or
            a generator.

    Returns:
        The number of batches; `None` for an endless or an unknown one.
    """
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        return cardinality if cardinality >= 0 else None
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    try:
        return len(data)
    except TypeError:
        return None
