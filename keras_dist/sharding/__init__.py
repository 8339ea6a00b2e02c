"""Which rows each rank reads, and the data made of them."""

from keras_dist.sharding.feed import (
    Feed,
    Split,
    hold_out,
    training_feed,
    validation_feed,
)

__all__ = ["Feed", "Split", "hold_out", "training_feed", "validation_feed"]
