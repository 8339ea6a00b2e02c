"""Detect ranks that wait forever, and record where each rank is. Needs no TensorFlow.

- `record`: where this rank is (epoch, step, collective), readable by other processes
- `stacks`: Python stacks, and the line of the user's code in them
- `end_note`: why this rank has ended, for those that wait for it
- `watchdog`: a thread that ends the job if no rank makes progress, by the heartbeats
- `seeds`: one seed for what the scripts of all ranks draw
- `rank_process`: the process of a rank under `keras-dist run`, which runs the user's
  script; and the report that it writes for the launcher if it fails
"""

from keras_dist.launch.monitor.end_note import describe_ended_rank, stay_for_readers
from keras_dist.launch.monitor.record import here
from keras_dist.launch.monitor.watchdog import (
    EXIT_CODE,
    VARIABLE,
    limit_of,
    set_limit,
    start,
    threads,
)

__all__ = [
    "EXIT_CODE",
    "VARIABLE",
    "describe_ended_rank",
    "here",
    "limit_of",
    "set_limit",
    "start",
    "stay_for_readers",
    "threads",
]
