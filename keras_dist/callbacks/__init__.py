"""Callbacks around Keras's training loop: a file for each job.

Public callbacks:

- `average_statistics`: synchronizes the weights that no gradient changes.
- `broadcast_variables`: copies the first rank's state to all ranks before step 1.
- `learning_rate_warmup`: scales the learning rate, with a warm-up.
- `metric_average`: makes metrics those of all ranks.
- `replica_check`: compares the models of all ranks by checksums.
- `stop_at_accuracy`: stops when a metric has reached a target.
- `stop_together`: stops all ranks after the same step when one rank requests it.
- `throughput`: rows per second, and seconds so far.

Callbacks that `dist_fit` adds if they are needed:

- `added`: `TensorBoard` gets the scaled rate, sharded data the number of the epoch, the
  reports of the watchdog epoch and step
- `user_callbacks`: calls the user's callbacks, some on the first rank only; an error on
  one rank ends all ranks.

Which callbacks run, and in which order:

- `callback_order`: the order of the list, and the callbacks of this rank.
"""

from keras_dist.callbacks.added import NextEpoch
from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import BroadcastVariables
from keras_dist.callbacks.callback_order import on_this_rank, order_callbacks
from keras_dist.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_dist.callbacks.metric_average import MetricAverage
from keras_dist.callbacks.replica_check import ReplicaCheck
from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
from keras_dist.callbacks.stop_together import StopTogether
from keras_dist.callbacks.throughput import Throughput, TrainingTime
from keras_dist.callbacks.user_callbacks import (
    autologged_once,
    destinations,
    first_rank_only,
    runs_on_first_rank_only,
)

__all__ = [
    "AverageStatistics",
    "BroadcastVariables",
    "LearningRateWarmup",
    "MetricAverage",
    "NextEpoch",
    "ReplicaCheck",
    "StopAtAccuracy",
    "StopTogether",
    "Throughput",
    "TrainingTime",
    "autologged_once",
    "order_callbacks",
    "destinations",
    "first_rank_only",
    "on_this_rank",
    "runs_on_first_rank_only",
]
