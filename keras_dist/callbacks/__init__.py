"""What happens around the training loop, one callback a file."""

from keras_dist.callbacks.average_statistics import AverageStatistics
from keras_dist.callbacks.broadcast_variables import BroadcastVariables
from keras_dist.callbacks.callback_order import on_this_rank, order_callbacks
from keras_dist.callbacks.first_rank_callbacks import (
    destinations,
    first_rank_only,
    runs_on_first_rank_only,
)
from keras_dist.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_dist.callbacks.metric_average import MetricAverage
from keras_dist.callbacks.nan_report import NanReport, NotFinite
from keras_dist.callbacks.next_epoch import NextEpoch
from keras_dist.callbacks.replica_check import ReplicaCheck
from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
from keras_dist.callbacks.stop_together import StopTogether
from keras_dist.callbacks.throughput import Throughput
from keras_dist.callbacks.training_time import TrainingTime

__all__ = [
    "AverageStatistics",
    "BroadcastVariables",
    "LearningRateWarmup",
    "MetricAverage",
    "NanReport",
    "NextEpoch",
    "NotFinite",
    "ReplicaCheck",
    "StopAtAccuracy",
    "StopTogether",
    "Throughput",
    "TrainingTime",
    "order_callbacks",
    "destinations",
    "first_rank_only",
    "on_this_rank",
    "runs_on_first_rank_only",
]
