"""Groups of ranks that train different models at the same time."""

import sys

from launch import launch

_SCRIPT = """
import keras, keras_dist, numpy as np
world = keras_dist.init(process_sets=[[2, 0], [1]])
x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
y = x.sum(axis=1)

def train(fit, rate, batch_size, scale, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
    history = fit(model, scale * x, y, batch_size=batch_size, epochs=3, shuffle=False,
                  verbose=0, **options)
    return model, history.history

own = [0, 2] if world.rank != 1 else [1]
scale = len(own)
model, history = train(keras_dist.dist_fit, 0.01, 4, scale, process_set=own)
expected, oracle = train(keras.Model.fit, 0.01 * len(own), 4 * len(own), scale)
for weight, other in zip(model.weights, expected.weights):
    np.testing.assert_allclose(weight.numpy(), other.numpy(), rtol=1e-5)
np.testing.assert_allclose(history["mae"], oracle["mae"], rtol=1e-5)
assert keras_dist.size() == 3  # outside of the fit all are there
kernels = keras_dist.gather(model.get_weights()[0].tolist())
assert kernels[0] == kernels[2] != kernels[1]
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=own)
weight = keras.Variable([0.0])
optimizer.apply([np.array([float(world.rank)], "float32")], [weight])
assert weight.numpy() == [-sum(own) / len(own)]
try:
    keras_dist.dist_fit(model, x, y, process_set=[1, 2])
except ValueError as error:
    assert "there are [[0, 2], [1]]" in str(error)
else:
    raise AssertionError("no error")
class Told(keras.callbacks.CSVLogger):
    begun = 0
    def on_predict_begin(self, logs=None):
        self.begun += 1
told = Told(f"predict.{world.rank}.csv")
found = keras_dist.DistributedModel(model, process_set=own).predict(
    x, callbacks=[told], verbose=0)
assert found.shape == (24, 1) and told.begun == (world.rank == own[0])
print("all is well")
"""


def test_each_process_set_trains_its_own_model(tmp_path):
    """Each set equals one process with its own global batch."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = launch([sys.executable, str(script)], ranks=3, timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("all is well") == 3


def test_different_process_sets_on_the_ranks_are_an_error(tmp_path):
    """Before any set is created."""
    script = tmp_path / "script.py"
    script.write_text(
        "import keras_dist.comm.world as w, keras_dist\n"
        "rank = w.launched()[1].rank\n"
        "keras_dist.init(process_sets=[[rank]])\n"
    )
    done = launch([sys.executable, str(script)], ranks=2, timeout=120)
    assert done.returncode != 0
    assert "The ranks disagree on `process_sets`" in done.stderr
