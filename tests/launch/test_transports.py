"""Which transport connects the ranks, and what keeps TensorFlow's from doing so."""

import pytest
from harness.launching import launch, write_script

_WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None  # not installed
import keras, keras_dist, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
keras_dist.dist_fit(model, np.ones((8, 2)), np.ones(8), verbose=2, batch="global")
print("weights", keras_dist.gather(model.get_weights()[0].tobytes()).__len__())
"""


def test_ranks_train_without_horovod(tmp_path):
    """And the plan says by what they are connected."""
    script = write_script(tmp_path, _WITHOUT_HOROVOD)
    done = launch([script], ranks=2, check=True)
    assert "transport      TensorFlow (gRPC)" in done.stdout
    assert "weights 2" in done.stdout


_DIFFERS = """
import os
names = ["horovod", "tensorflow"]
os.environ["KERAS_DIST_TRANSPORT"] = names[int(os.environ["HOROVOD_RANK"])]
import keras_dist
keras_dist.init()
"""

_TOO_LATE = """
import tensorflow as tf
tf.constant(1) + 1
import keras_dist
"""


@pytest.mark.parametrize(
    ("script", "texts", "choice"),
    [
        (
            _DIFFERS,
            ["different transports", "horovod on rank 0", "tensorflow on rank 1"],
            "",
        ),
        (_TOO_LATE, ["Move that import to the first line"], "tensorflow"),
        ("import keras_dist", ["KERAS_DIST_TRANSPORT=gloo"], "gloo"),
    ],
    ids=["differs", "too late", "unknown"],
)
def test_what_keeps_ranks_from_a_transport_is_an_error(tmp_path, script, texts, choice):
    """It names what was received, and what to do; no rank waits for another one."""
    script = write_script(tmp_path, script)
    env = {"KERAS_DIST_TRANSPORT": choice}
    done = launch([script], ranks=2, env=env, timeout=60)
    assert done.returncode == 1
    assert all(text in done.stderr for text in texts), done.stderr
