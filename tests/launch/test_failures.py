"""A rank that fails ends the job, and its own error is the one to read."""

import signal
import socket

import pytest
from harness.forked import alone, torchrun
from harness.launching import MISBEHAVES, launch, write_script

_READS_RESULTS = """
import keras, keras_dist, numpy as np, tensorflow as tf
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
class Reads(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.get_metrics_result()
class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 9
    def __getitem__(self, batch):
        if batch == 4 and keras_dist.rank() == 1:
            raise KeyError("tea")
        return np.ones((4, 2)), np.ones((4, 1))
keras_dist.dist_fit(model, Rows(), verbose=0, shuffle=False, shard="none",
                    callbacks=[Reads()])
"""


def test_data_that_fails_after_a_callback_has_read_results_ends_all(run_ranks):
    """The other rank is in its step, and not where a rank waits for the results."""
    (code, _), (failed, out) = run_ranks(torchrun, [0, 1], 2, _READS_RESULTS)
    assert (code, failed) == (1, 1) and "KeyError" in out and "tea" in out


@pytest.mark.parametrize("transport", ["horovod", "tensorflow"])
def test_a_rank_that_leaves_while_others_train_is_the_cause(transport):
    """By `sys.exit(0)`: in the headline, and by the rank that had to fail for it."""
    env = {"MISBEHAVES": "leave epoch-3 1", "KERAS_DIST_TRANSPORT": transport}
    done = launch([MISBEHAVES], ranks=2, env=env)
    assert done.returncode == 1, done.stderr
    text = "ended with no error in epoch 3 while others were training."
    report = done.stderr[done.stderr.rindex("keras-dist: rank 1 failed first") :]
    assert report.splitlines()[1] == f"It {text}"
    assert f"Rank 1 on {socket.gethostname()} {text}" in report, report


_OWN_RESET = """
import socket, struct, sys
import tensorflow as tf
import keras_dist

def read(*_):
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = socket.create_connection(server.getsockname())
        link, _ = server.accept()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
        yield reader.recv(1)

if keras_dist.rank() == 1:
    spec = tf.TensorSpec((), tf.string)
    data = tf.data.Dataset.from_generator(read, output_signature=spec)
    list(data if sys.argv[1] == "data" else read())
try:
    keras_dist.gather("tea")
except RuntimeError:
    raise KeyError("no more tea") from None
"""


@pytest.mark.parametrize("case", [pytest.param("own", marks=pytest.mark.long), "data"])
def test_a_connection_of_the_users_that_is_reset_is_the_cause(tmp_path, case):
    """Though ranks that have lost another one have the same text in their errors."""
    done = launch([write_script(tmp_path, _OWN_RESET), case], ranks=2)
    report = done.stderr[done.stderr.rindex("keras-dist: rank") :]
    assert report.startswith("keras-dist: rank 1 failed first"), report
    assert "ConnectionResetError" in report and "Rank 0 was" in report, report


_LEAVES_ALONE = """
import sys
sys.argv[0] = "keras-dist"  # which needs no TensorFlow
from keras_dist.launch.monitor import record, watchdog
watchdog.note_end(0)
record.here.enter("begin", epoch=2)
sys.exit(0)
"""


def test_ranks_that_leave_together_have_not_failed(tmp_path):
    """Each by `sys.exit(0)` in the same epoch."""
    done = launch([write_script(tmp_path, _LEAVES_ALONE)], ranks=2)
    assert (done.returncode, done.stderr) == (0, "")


_KILLED = """
import os, signal
import keras, keras_dist, numpy as np
from keras_dist.training import saving

saving.install()  # as the import does in a rank that was not forked
path, kills = os.environ["FILE"], "KILLS" in os.environ

@keras.saving.register_keras_serializable("tests")
class Heavy(keras.layers.Dense):
    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["padding"] = np.random.default_rng(0).random(2**20)
        if kills and int(model.optimizer.iterations) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
    def load_own_variables(self, store):
        self.kernel.assign(store["0"])
        self.bias.assign(store["1"])

model = keras.Sequential([keras.Input((2,)), Heavy(1)])
model.compile("sgd", "mse")
if kills:
    saves = keras.callbacks.ModelCheckpoint(path, save_weights_only="weights" in path)
    keras_dist.dist_fit(model, np.ones((32, 2)), np.ones(32), batch_size=4, epochs=2,
                        verbose=0, callbacks=[saves])
else:
    model.load_weights(path)
    print("loaded", float(model.layers[0].kernel[0, 0]))
"""


@pytest.mark.parametrize(
    "name", [pytest.param("model.keras", marks=pytest.mark.long), "model.weights.h5"]
)
def test_a_killed_process_leaves_the_file_before(run_ranks, tmp_path, name):
    """Killed in the middle of the second checkpoint: the first one loads."""
    folder = tmp_path / "files"
    folder.mkdir()
    env = {"FILE": str(folder / name)}
    done = run_ranks(torchrun, [0, 1], 2, _KILLED, env=env | {"KILLS": "1"})
    assert done[0][0] == -signal.SIGKILL, done
    [_, *left] = sorted(file.name for file in folder.iterdir())  # after the draft
    assert left == [name]
    [(code, out)] = run_ranks(alone, [0], 1, _KILLED, env=env)
    assert code == 0 and "loaded" in out, out


def test_a_folder_that_each_rank_makes_is_an_error_with_a_way_out(tmp_path):
    """As on one process, it is there for the second one."""
    script = write_script(tmp_path, "import os, sys; os.mkdir(sys.argv[1])")
    done = launch([script, tmp_path / "logs"], ranks=2)
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr and "first_rank" in done.stderr
