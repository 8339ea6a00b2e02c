"""Shard the user's data: which rows or batches each rank reads at each step.

There are three kinds of data, and the file names say which of them a file is about:
`arrays*` (sharded by row), `batches*` whose number is known (sharded by batch, round
robin), and `batches_unknown_length` (the same, until one rank has no batch left).

- `training`: `training_feed`: one rank's training data, whatever its kind
- `validation`: `validation_feed`, `hold_out`: the same for an evaluation
- `feed`: the values passed around: `Split` goes in, `Feed` comes out; `Channel`
- `arrays`: arrays of the same rows; a `tf.data.Dataset` of one rank's rows
- `arrays_rows`: row arithmetic: rows and steps of a rank, rows left out
- `arrays_order`: the permutation of the rows in each pass
- `arrays_schedule`: which rows come in which epoch, also after a resume; `Position`
- `arrays_reader`: read rows by index, from memory or from a memory-mapped file
- `batches`: `rank_batches`: one rank's batches; chooses among the files below
- `batches_stream`: `Stream`: one view of data sets, sequences, generators, loaders
- `batches_known_length`: shard a `tf.data.Dataset` of known or infinite length
- `batches_sequence`: shard a `keras.utils.PyDataset` by index
- `batches_schedule`: which batches come in which epoch, also after a resume
- `batches_unknown_length`: shard generators and data sets of unknown length

This package asks neither Horovod nor `comm` for anything: rank and size are arguments,
and data that has to communicate while it is read does so through a `Channel`.
"""

from keras_dist.sharding.arrays import is_arrays
from keras_dist.sharding.arrays_schedule import EpochSchedule, Position, either
from keras_dist.sharding.batches import own_error, reading
from keras_dist.sharding.batches_stream import Stream, is_stream
from keras_dist.sharding.feed import Channel, Feed, Split
from keras_dist.sharding.training import training_feed
from keras_dist.sharding.validation import hold_out, validation_feed

__all__ = [
    "Channel",
    "EpochSchedule",
    "Feed",
    "Position",
    "Split",
    "Stream",
    "either",
    "hold_out",
    "is_arrays",
    "is_stream",
    "own_error",
    "reading",
    "training_feed",
    "validation_feed",
]
