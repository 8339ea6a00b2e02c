"""From the user's data to the rows or batches that Keras gets on each rank.

What the user gave becomes a `Source` (or `Arrays`), a `Division` says which rows or
batches of it come at each step on each rank, and a `Feed` hands this rank's part to
Keras. From the bottom:

- `division`: `Division`, the arithmetic of passes, epochs and steps; `ReadContext`
- `pipeline`: what a `tf.data.Dataset` was made of: inputs, shuffles, caches
- `dealer`: `Dealer`, what a rank reads of batches that all ranks have
- `arrays`: `Arrays`, rows in memory or in memory-mapped files, and their order
- `presharded`: data sets that `keras_dist.shard` divided before rows were decoded
- `draws`: switches `random` and `numpy.random` between shared numbers and a rank's own
- `source`: `Source`, one view of all data that comes in batches
- `sequence`: read a `PyDataset` by index
- `stream`: read data of unknown length, of which all ranks agree on the end
- `feed`: `Feed`, one rank's data for Keras
- `adapters`: make a `Feed` of each kind of data

To support a new kind of data: if it yields batches, `Source` must know its length and
how to iterate over it, and the rest follows.

Nothing here imports Horovod or `comm`. Rank and size are arguments, and data that has
to communicate while it is read does so through `ReadContext.gather`.
"""
