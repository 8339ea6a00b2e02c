"""Which rows each rank reads, and the data made of them."""

from keras_dist.sharding.arrays import is_arrays
from keras_dist.sharding.feed import Feed, Split
from keras_dist.sharding.training import training_feed
from keras_dist.sharding.validation import hold_out, validation_feed

__all__ = [
    "Feed",
    "Split",
    "hold_out",
    "is_arrays",
    "training_feed",
    "validation_feed",
]
