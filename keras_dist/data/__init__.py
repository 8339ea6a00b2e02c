"""From the user's data to the rows or batches that Keras gets on each rank.

What the user gave becomes a `Source` (or `Arrays`), a `Division` says which rows or
batches of it come at each step on each rank, and a `Feed` hands this rank's part to
Keras. From the bottom:

- `steps`: rules for the number of steps
- `division`: `Division`, the arithmetic of passes, epochs and steps; `ShardSpec`
- `pipeline`: what a `tf.data.Dataset` was made of: inputs, shuffles, caches
- `dealer`: `Dealer`, what a rank reads of batches that all ranks have
- `arrays`: `Arrays`, rows in memory or in memory-mapped files, in a `RowOrder`
- `presharded`: data sets that `keras_dist.shard` divided before rows were decoded
- `draws`: which numbers `random` and `numpy.random` draw: those of all ranks, or not
- `source`: `Source`, one view of all data that comes in batches
- `sequence`: read a `PyDataset` by index
- `stream`: read data of unknown length, of which all ranks agree on the end
- `adapters`: choose among these for each kind of source
- `feed`: `training_feed` and `validation_feed`, for every kind of data

To support a new kind of data: if it yields batches, `Source` must know its length and
how to iterate over it, and the rest follows.

Nothing here imports Horovod or `comm`. Rank and size are arguments, and data that has
to communicate while it is read does so through `ShardSpec.gather`.
"""

from keras_dist.data.adapters import DataAdapter, is_dealt
from keras_dist.data.arrays import (
    Arrays,
    is_arrays,
    is_scipy_sparse,
    is_uneven,
    lists_to_arrays,
    seed_of_keras,
)
from keras_dist.data.dealer import Dealer, is_mark, marked
from keras_dist.data.division import (
    DataPosition,
    Division,
    ShardSpec,
    local_items,
)
from keras_dist.data.draws import preserve_generators
from keras_dist.data.feed import (
    Feed,
    hold_out,
    own_error,
    reading,
    training_feed,
    validation_feed,
)
from keras_dist.data.pipeline import (
    as_untuned,
    cache_files,
    count_batches,
    find_batch_size,
    list_seeds,
    list_unshuffled_inputs,
)
from keras_dist.data.presharded import (
    Presharded,
    divide_rows,
    length_before_repeat,
    presharded_of,
)
from keras_dist.data.sequence import ShardedSequence
from keras_dist.data.source import (
    EQUAL_ROWS,
    DeclaredIterable,
    Source,
    draw_other_numbers,
    is_source,
)

__all__ = [
    "EQUAL_ROWS",
    "draw_other_numbers",
    "Arrays",
    "DataPosition",
    "Dealer",
    "DeclaredIterable",
    "Division",
    "Feed",
    "DataAdapter",
    "Presharded",
    "ShardSpec",
    "ShardedSequence",
    "Source",
    "as_untuned",
    "find_batch_size",
    "list_unshuffled_inputs",
    "cache_files",
    "divide_rows",
    "hold_out",
    "is_arrays",
    "is_dealt",
    "is_mark",
    "is_scipy_sparse",
    "is_source",
    "is_uneven",
    "length_before_repeat",
    "count_batches",
    "lists_to_arrays",
    "marked",
    "own_error",
    "local_items",
    "preserve_generators",
    "presharded_of",
    "reading",
    "seed_of_keras",
    "list_seeds",
    "training_feed",
    "validation_feed",
]
