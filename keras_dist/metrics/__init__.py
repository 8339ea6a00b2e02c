"""Metrics of all ranks: bring their state together, then take `result()`."""

from keras_dist.metrics.rank_report import Seen
from keras_dist.metrics.result import global_result
from keras_dist.metrics.stateful import exceptions

__all__ = ["Seen", "exceptions", "global_result"]
