"""The timeline, process sets and the end of `keras_dist.horovod`."""

import sys

from launch import launch

_SCRIPT = """
import sys
import keras_dist
import keras_dist.horovod as hvd

def work(path, scale=1):
    hvd.init()
    found = [hvd.rank(), hvd.size()]
    hvd.start_timeline(path, mark_cycles=True)
    found.append(float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum)) * scale)
    hvd.stop_timeline()
    found.append(hvd.is_initialized())
    hvd.shutdown()
    found.append(hvd.is_initialized())
    try:
        hvd.init()
    except RuntimeError as error:
        found.append("was shut down" in str(error))
    return found

if __name__ == "__main__":
    print("found", keras_dist.run(work, args=sys.argv[1:], kwargs={"scale": 2}, np=2))
"""


def test_a_function_runs_on_ranks_that_record_a_timeline_and_shut_down(tmp_path):
    """What each has returned is in rank order; a second `init` is an error."""
    script, timeline = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), str(timeline)]
    env = {"HOROVOD_TIMELINE": "DYNAMIC"}
    done = launch(command, ranks=None, timeout=200, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [[rank, 2, 6.0, True, False, True] for rank in range(2)]
    assert f"found {expected}" in done.stdout
    assert "ALLREDUCE" in timeline.read_text()


_PROCESS_SETS = """
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
assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 3
print("all is well")
"""


def test_collectives_are_among_the_ranks_of_a_process_set(tmp_path):
    """Of one that `init` registers, or of one that is added."""
    script = tmp_path / "script.py"
    script.write_text(_PROCESS_SETS)
    done = launch([sys.executable, str(script)], ranks=3, timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("all is well") == 3


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
