"""Which rows each rank reads, and the data made of them."""

from keras_dist.sharding.arrays import is_arrays
from keras_dist.sharding.arrays_schedule import EpochSchedule, Position, either
from keras_dist.sharding.batches import own_error, reading
from keras_dist.sharding.batches_stream import Stream, is_stream
from keras_dist.sharding.feed import Channel, Feed, Split
from keras_dist.sharding.training import training_feed
from keras_dist.sharding.validation import hold_out, validation_feed

__all__ = [
    "EpochSchedule",
    "Feed",
    "Position",
    "Split",
    "Stream",
    "Channel",
    "either",
    "hold_out",
    "is_arrays",
    "is_stream",
    "own_error",
    "reading",
    "training_feed",
    "validation_feed",
]
