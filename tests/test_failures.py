"""A rank that fails ends the job, and its own error is the one to read."""

import sys

import pytest
from launch import launch

_SCRIPT = """
import keras, keras_dist, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and keras_dist.rank() == 1:
            raise KeyError("tea")
keras_dist.dist_fit(model, np.ones((90, 2)), np.ones(90), batch_size=4, verbose=0,
                    callbacks=[Fails()])
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_error_on_one_rank_ends_all_of_them(tmp_path, ranks):
    """The others say that a rank has ended, and not a page of TensorFlow."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = launch([sys.executable, str(script)], ranks=ranks, timeout=120)
    assert done.returncode != 0
    assert "[1]<stderr>:KeyError: 'tea'" in done.stderr
    others = [line for line in done.stderr.splitlines() if line.startswith("[0]")]
    if any("Error: " in line for line in others):
        assert any("Another rank has ended" in line for line in others)
    assert "UnknownError" not in done.stderr
