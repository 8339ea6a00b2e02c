"""Metrics over all ranks: synchronize their state, then take `result()`.

- `result`: `global_result`, the values of the metrics over the rows of all ranks
- `rank_report`: what each rank sends to the others first, and the check that they match
- `states`: sum, average or copy the state of all ranks by one allreduce
- `stateful`: which metrics hold state, and by which rule it is synchronized
"""

from keras_dist.training.metrics.rank_report import Seen
from keras_dist.training.metrics.result import global_result
from keras_dist.training.metrics.stateful import exceptions

__all__ = ["Seen", "exceptions", "global_result"]
