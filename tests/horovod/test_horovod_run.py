"""`keras_dist.horovod` on one process."""

from harness.forked import alone

_ALONE = """
import sys
sys.modules["horovod"] = sys.modules["horovod.tensorflow"] = None  # not installed
import keras, keras_dist, numpy as np
import keras_dist.horovod as hvd
hvd.init()
assert repr(keras_dist.init()) == (
    "World(rank=0, size=1, local_rank=0, local_size=1)"
)
assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
assert hvd.is_initialized()
assert float(hvd.allreduce(3.0, prescale_factor=2.0, op=hvd.Sum)) == 6
assert hvd.allgather([1, 2]).numpy().tolist() == [1, 2]
assert int(hvd.broadcast(7, 0)) == 7 and hvd.broadcast_object("a") == "a"
assert hvd.allgather_object({"b": 1}) == [{"b": 1}]
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
]
model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=callbacks)
keras_dist.dist_fit(model, np.ones((8, 2)), np.ones(8), verbose=0)
assert keras_dist.average(3) == 3
try:
    hvd.ProcessSet([0])
except RuntimeError as error:
    assert "keras-dist install-horovod" in str(error)
    print("all is well")
"""


def test_one_process_needs_no_horovod(run_ranks):
    """A script runs alone; what is Horovod's own says how to install it."""
    [(code, out)] = run_ranks(alone, [0], 1, _ALONE)
    assert code == 0 and "all is well" in out, out
