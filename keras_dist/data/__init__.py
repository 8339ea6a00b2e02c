"""Shard the user's data: which rows or batches each rank reads at each step.

Any kind of data:

- `training`: `training_feed`, this rank's arguments of `Model.fit` for its data
- `validation`: `validation_feed` and `hold_out`, the same for an evaluation
- `steps`: rules for the number of steps
- `feed`: `ShardSpec` goes into these functions and `Feed` comes out; `Channel`

Arrays, sharded by row:

- `arrays`: `Arrays`, and a `tf.data.Dataset` of one rank's rows
- `arrays_rows`: row arithmetic: rows and steps of a rank, rows left out
- `arrays_order`: the permutation of the rows in each pass
- `arrays_schedule`: which rows come in which epoch, also after a resume; `DataPosition`
- `arrays_reader`: read rows by index, from memory or from a memory-mapped file

Data that `keras_dist.shard` divides before its rows are decoded:

- `division`: divide a `tf.data.Dataset`; find out whether one was divided
- `auto_shard`: let TensorFlow divide the files, for `shard="source"`
- `declared`: sequences and iterables of which the user says what all ranks have

Data that comes in batches, sharded by batch:

- `batches`: `rank_batches`, which chooses among the files below
- `pipeline`: what a `tf.data.Dataset` was made of: inputs, shuffles, caches
- `batches_stream`: `Stream`, one view of data sets, sequences, generators, loaders
- `batches_known_length`: shard a `tf.data.Dataset` of known or infinite length
- `batches_sequence`: shard a `keras.utils.PyDataset`, by index
- `leftover`: what becomes of the last batches, if fewer are left than ranks
- `batches_divided`: read a data set that was divided before its rows were decoded
- `batches_indices`: which of the user's batches a rank reads at a step
- `batches_schedule`: which batches come in which epoch, also after a resume

The same, of unknown length: the ranks agree before each batch that all have one.

- `batches_unknown_length`: shard generators, data loaders, filtered data sets

To support a new kind of data: if it yields batches, `Stream` must know its length and
how to iterate over it, and the rest follows. Else write a file beside `arrays`, and
choose it in `training_feed` and `validation_feed`.

Nothing here imports Horovod or `comm`. Rank and size are arguments, and data that has
to communicate while it is read does so through a `Channel`.
"""

from keras_dist.data.arrays import is_arrays
from keras_dist.data.arrays_schedule import DataPosition, EpochSchedule, either
from keras_dist.data.auto_shard import divided_at_source
from keras_dist.data.batches import own_error, reading
from keras_dist.data.batches_stream import Stream, is_stream
from keras_dist.data.declared import (
    DeclaredIterable,
    DeclaredSequence,
    stream_of,
)
from keras_dist.data.division import (
    Division,
    divided,
    division_of,
    length_before_repeat,
    sources_of,
)
from keras_dist.data.feed import Channel, Feed, ShardSpec
from keras_dist.data.pipeline import seeds_of
from keras_dist.data.training import training_feed
from keras_dist.data.validation import hold_out, validation_feed

__all__ = [
    "Channel",
    "DeclaredIterable",
    "DeclaredSequence",
    "Division",
    "EpochSchedule",
    "Feed",
    "DataPosition",
    "ShardSpec",
    "Stream",
    "divided",
    "divided_at_source",
    "division_of",
    "either",
    "hold_out",
    "is_arrays",
    "is_stream",
    "length_before_repeat",
    "own_error",
    "reading",
    "seeds_of",
    "sources_of",
    "stream_of",
    "training_feed",
    "validation_feed",
]
