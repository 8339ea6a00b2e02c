"""Train Keras 3 models on many processes over Horovod.

`model.fit(…)` becomes `keras_dist.dist_fit(model, …)`: the number of ranks changes the
time, not the model.
"""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "keras_dist needs Keras's TensorFlow backend. "
        f"Received: the {keras.backend.backend()} backend. "
        "Set KERAS_BACKEND=tensorflow before Keras is imported."
    )

from keras_dist.callbacks import (  # noqa: E402 - after the check of the backend
    AverageStatistics,
    BroadcastVariables,
    LearningRateWarmup,
    MetricAverage,
    StopAtAccuracy,
    StopTogether,
    Throughput,
    TrainingTime,
)
from keras_dist.comm import (  # noqa: E402
    World,
    average,
    broadcast,
    gather,
    init,
    local_rank,
    local_size,
    prepare,
    rank,
    size,
    sum,
)
from keras_dist.fit import DistributedModel, dist_fit  # noqa: E402
from keras_dist.optimizer import DistributedOptimizer  # noqa: E402
from keras_dist.version import __version__  # noqa: E402

prepare()
del prepare

__all__ = [
    "AverageStatistics",
    "BroadcastVariables",
    "DistributedModel",
    "DistributedOptimizer",
    "LearningRateWarmup",
    "MetricAverage",
    "StopAtAccuracy",
    "StopTogether",
    "Throughput",
    "TrainingTime",
    "World",
    "__version__",
    "average",
    "broadcast",
    "dist_fit",
    "gather",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "size",
    "sum",
]
