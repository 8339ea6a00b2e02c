"""Train Keras 3 models on many processes over Horovod.

`model.fit(…)` becomes `keras_dist.dist_fit(model, …, batch="global")`: the number of
ranks changes the time, not the model.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_dist import version
from keras_dist.version import __version__

__all__ = [
    "AverageStatistics",
    "BroadcastVariables",
    "DistributedModel",
    "DistributedOptimizer",
    "LearningRateWarmup",
    "MetricAverage",
    "ReplicaCheck",
    "StopAtAccuracy",
    "StopTogether",
    "Throughput",
    "World",
    "__version__",
    "average",
    "broadcast",
    "check_split",
    "dist_fit",
    "distribute",
    "first_rank",
    "first_rank_only",
    "gather",
    "gather_rows",
    "init",
    "local_batch_size",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shard",
    "size",
    "sum",
    "sum_over_rows",
    "weighted_mean",
]

# The command starts and ends processes, and has no use for TensorFlow.
_is_command = Path((sys.argv or [""])[0]).name == "keras-dist" or (
    sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "keras_dist"
)
_missing = [n for n in ("tensorflow", "keras") if importlib.util.find_spec(n) is None]

if not _missing and not _is_command:
    import keras
    import tensorflow

    version.require("Keras", keras.__version__, version.OLDEST_KERAS)
    version.require("TensorFlow", tensorflow.__version__, version.FIRST_TENSORFLOW)
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "keras_dist needs Keras's TensorFlow backend. "
            f"Received: the {keras.backend.backend()} backend. "
            "Set KERAS_BACKEND=tensorflow before Keras is imported."
        )

    from keras_dist.callbacks.average_statistics import AverageStatistics
    from keras_dist.callbacks.broadcast_variables import BroadcastVariables
    from keras_dist.callbacks.learning_rate_warmup import LearningRateWarmup
    from keras_dist.callbacks.metric_average import MetricAverage
    from keras_dist.callbacks.replica_check import ReplicaCheck
    from keras_dist.callbacks.stop_at_accuracy import StopAtAccuracy
    from keras_dist.callbacks.stop_together import StopTogether
    from keras_dist.callbacks.throughput import Throughput
    from keras_dist.callbacks.user_callbacks import first_rank_only
    from keras_dist.comm import (
        World,
        average,
        broadcast,
        first_rank,
        gather,
        init,
        local_rank,
        local_size,
        prepare,
        rank,
        size,
        sum,
    )
    from keras_dist.distribution import VARIABLE, distribute
    from keras_dist.fit import DistributedModel, dist_fit
    from keras_dist.launch.function import run
    from keras_dist.optimizer.attach import DistributedOptimizer
    from keras_dist.setup.shard import local_batch_size, shard
    from keras_dist.training import saving
    from keras_dist.training.check_split import check_split
    from keras_dist.training.rows import gather_rows, sum_over_rows, weighted_mean

    prepare()
    saving.install()
    if os.environ.get(VARIABLE):
        distribute(os.environ[VARIABLE])  # type: ignore[arg-type]
    del prepare, saving, tensorflow, VARIABLE
elif _missing and not TYPE_CHECKING:  # a type checker would take any name
    # `keras-dist install-horovod` must start here too, and print what it needs.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'keras_dist' has no attribute {name!r}")
        raise ImportError(
            f"keras_dist.{name} needs TensorFlow {version.TENSORFLOW_RANGE} and "
            f"Keras {version.format_version(version.OLDEST_KERAS)} or newer. "
            f"Received: an environment without {' and '.join(_missing)}. "
            f"Run: pip install '{version.TENSORFLOW}' '{version.KERAS}'"
        )
