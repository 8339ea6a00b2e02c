"""Metrics of all ranks: bring their state together, then take `result()`."""

from keras_dist.metrics.parts import exceptions
from keras_dist.metrics.result import global_result
from keras_dist.metrics.told import Seen

__all__ = ["Seen", "exceptions", "global_result"]
