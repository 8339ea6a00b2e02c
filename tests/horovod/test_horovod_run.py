"""The timeline, process sets and the end of `keras_dist.horovod`."""

import sys

from launch import launch

_PROCESS_SETS = """
import sys
import keras, tensorflow as tf
import keras_dist.horovod as hvd
both, one = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
hvd.init(process_sets=[both, one])
rank = hvd.rank()
own = one if rank == 1 else both
assert own.included() and own.size() == len(own.ranks) and hvd.size() == 3
assert own.rank() == own.ranks.index(rank)
mean = hvd.allreduce(float(rank), process_set=own)
assert float(mean) == sum(own.ranks) / len(own.ranks)
assert int(hvd.broadcast(rank, own.ranks[-1], process_set=own)) == own.ranks[-1]
assert hvd.broadcast_object({"r": rank}, own.ranks[0], process_set=own) == {
    "r": own.ranks[0]
}
assert hvd.allgather_object(rank, process_set=own) == own.ranks
variables = [keras.Variable(float(rank)), tf.Variable(rank)]
hvd.broadcast_variables(variables, own.ranks[-1], process_set=own)
assert [float(variable) for variable in variables] == [own.ranks[-1]] * 2
added = hvd.add_process_set([0, 1])
assert added.process_set_id and added.included() == (rank < 2)
if added.included():
    assert hvd.allgather([rank], process_set=added).numpy().tolist() == [0, 1]
assert hvd.remove_process_set(added) and added.size() is None
hvd.start_timeline(sys.argv[1], mark_cycles=True)
assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 3
hvd.stop_timeline()
assert hvd.is_initialized()
hvd.shutdown()
assert not hvd.is_initialized()
try:
    hvd.init()
except RuntimeError as error:
    print("all is well" if "was shut down" in str(error) else error)
"""


def test_process_sets_a_timeline_and_the_end(tmp_path):
    """Sets that `init` registers or that are added; a second `init` is an error."""
    script, timeline = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(_PROCESS_SETS)
    command = [sys.executable, str(script), str(timeline)]
    env = {"HOROVOD_TIMELINE": "DYNAMIC"}
    done = launch(command, ranks=3, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("all is well") == 3
    assert "ALLREDUCE" in timeline.read_text()


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


def test_one_process_needs_no_horovod(tmp_path):
    """A script runs alone; what is Horovod's own says how to install it."""
    script = tmp_path / "script.py"
    script.write_text(_ALONE)
    done = launch([sys.executable, str(script)], ranks=None, timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "all is well" in done.stdout
