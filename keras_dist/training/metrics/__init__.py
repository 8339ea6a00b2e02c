"""Metrics over all ranks.

- `sync`: synchronize the state of metrics, then take `result()`: `global_result`
- `step_logs`: values in what a step returned to be logged
"""

from keras_dist.training.metrics.sync import UpdateCounts, exceptions, global_result

__all__ = ["UpdateCounts", "exceptions", "global_result"]
