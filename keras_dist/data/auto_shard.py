"""Let TensorFlow divide the files that a data set is read from: `shard="source"`."""

import tensorflow as tf

from keras_dist.data.division import Division, remembered

_BY_FILE = tf.data.experimental.AutoShardPolicy.FILE.value


def divided_at_source(
    dataset: tf.data.Dataset, *, rank: int, size: int
) -> tf.data.Dataset | None:
    """The batches of one rank, which are made of its own files.

    TensorFlow looks for what reads files (`TFRecordDataset`, `TextLineDataset`, …) in
    the pipeline, and divides the names before it.

    Args:
        dataset: Batches, the same pipeline on all ranks.
        rank: This rank.
        size: Number of ranks.

    Returns:
        The data set, or `None` if TensorFlow finds nothing that reads files.
    """
    types = tf.compat.v1.data.get_output_types(dataset)
    shapes = tf.compat.v1.data.get_output_shapes(dataset)
    try:
        own = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=size,
            index=rank,
            output_types=tf.nest.flatten(types),
            output_shapes=tf.nest.flatten(shapes),
            auto_shard_policy=_BY_FILE,
            num_replicas=size,
        )
    except (tf.errors.NotFoundError, tf.errors.UnimplementedError):
        return None
    found = tf.data.experimental.from_variant(own, dataset.element_spec)
    return remembered(found, Division("source", None, rank, size, dataset))
