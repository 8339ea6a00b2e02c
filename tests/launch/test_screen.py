"""What a user sees of a training on two ranks, from the first line to the last."""

import sys

import pytest
from harness.launching import ROOT, RUN, finish, launch, run, start, write_script

_SCRIPT = """
import sys
import keras, numpy as np
import keras_dist
from keras import callbacks

class Decides(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.25)

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((400, 3)), np.ones(400)
x[0, 0] = np.inf if "inf" in sys.argv else 1
printing = [
    callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10, verbose=1),
    callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=10, verbose=1),
    callbacks.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
    callbacks.ModelCheckpoint(sys.argv[1], verbose=1),
    callbacks.TerminateOnNaN(),
    Decides(),
]
history = keras_dist.dist_fit(model, x, y, batch_size=32, epochs=9, callbacks=printing)
rates = keras_dist.gather(float(model.optimizer.learning_rate.numpy()))
print("after", len(history.epoch), "epochs:", rates, flush=True)
assert keras.config.is_interactive_logging_enabled()
if keras_dist.rank() == 1:
    model(np.ones((2, 5)))
keras_dist.dist_fit(model, x, y, verbose=0)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Standard output and standard error of a training that fails at its end."""
    folder = tmp_path_factory.mktemp("screen")
    command = [*RUN, "-np", 2, write_script(folder, _SCRIPT), folder / "m.keras"]
    # Not as text: Python would make a line of each state of a progress bar.
    done = finish(start(command, text=False, start_new_session=True), 200)
    assert done.returncode == 1, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_callbacks_that_print_do_so_on_the_first_rank(seen):
    """And run on all: what they decide is the same there."""
    stdout, _ = seen
    for text in (
        "Epoch 1: LearningRateScheduler setting learning rate",
        "Epoch 2: ReduceLROnPlateau reducing learning rate",
        "Epoch 3: early stopping",
        "Epoch 1: finished saving model",
    ):
        assert stdout.count(text) == 1, text
    own = [line for line in stdout.split("\n") if line.startswith("[1]")]
    assert own == ["[1] after 3 epochs: [0.25, 0.25]"]


def test_the_speed_stands_in_the_progress_bar_alone(seen):
    """Not in a line of its own, too."""
    stdout, _ = seen
    assert "rows_per_second: " in stdout and "rows/s" not in stdout


def test_lines_of_the_first_rank_have_no_prefix(seen):
    """They are one process's; its progress bar has its control characters."""
    stdout, _ = seen
    assert "\b\r" in stdout and "[0] " not in stdout
    assert "\nafter 3 epochs: [0.25, 0.25]\n" in stdout


def test_the_report_stands_at_the_end(seen):
    """The traceback of the first failure, then a line for each rank that helps."""
    _, stderr = seen
    lines = stderr[stderr.index("keras-dist: rank 1 failed first, ") :].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert "but received input with shape (2, 5)" in "\n".join(lines[:-1])
    assert lines[-1].startswith("Rank 0 was in ")
    says = "the traceback of the rank that failed first, then a line for each rank"
    done = run("--help", COLUMNS="500")
    page = (ROOT / "docs" / "how_to" / "launch.md").read_text()
    for text in (done.stdout, page):
        assert says in " ".join(text.split())


def test_without_np_there_is_a_rank_for_each_gpu():
    """Of one machine; without one it is an error."""
    show = ["sh", "-c", "echo rank $HOROVOD_RANK of $HOROVOD_SIZE"]
    done = run(*show, CUDA_VISIBLE_DEVICES="0,1")
    ranks = ["[1] rank 1 of 2", "rank 0 of 2"]
    assert sorted(done.stdout.splitlines()) == ranks, done.stderr
    assert done.stderr == ""
    done = run(*show, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "by -np N, -H or a GPU of this host" in done.stderr


def test_a_wrong_option_shows_the_usage_of_its_command():
    """And the list of commands has those for users alone."""
    done = run("--np", 2, "script.py")
    assert done.returncode == 2
    assert "usage: keras-dist run -np N [options]" in done.stderr
    assert "unrecognized arguments: --np" in done.stderr
    listed = launch([sys.executable, "-m", "keras_dist", "--help"]).stdout
    assert "check " in listed and "not to be called" not in listed
    assert "host-agent" not in listed
