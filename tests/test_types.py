"""A type checker finds the mistakes in a user's script, and nothing else."""

import inspect
import re
import sys

from harness.launching import ROOT, launch, write_script

import keras_dist

SCRIPT = """
import keras
import numpy as np

import keras_dist

x, y = np.ones((8, 2)), np.ones((8, 1))
model = keras.Sequential([keras.layers.Dense(1)])
keras_dist.dist_fit(model, x, y, batch_size=4, lr_scaling="linear")
keras_dist.dist_fit(model, x, y, lr_scaling=lambda size: size**0.5)
many = keras_dist.DistributedModel(model, lr_scaling="none")
history = many.fit(x, y, epochs=2, callbacks=[keras_dist.StopTogether()])
print(history.history["loss"], keras_dist.size() + 1)
seeds = keras_dist.broadcast([1, 2] if keras_dist.rank() == 0 else None)
print(seeds[0] + keras_dist.gather(3)[0], keras_dist.shard(8, batch="global"))
many.predict(x, gather="first", callbacks=keras_dist.Throughput())

keras_dist.dist_fitt(model, x, y)
keras_dist.dist_fit(model, x, y, lr_scaling="liner")
many.fit(x, y, lr_scaling="liner")
many.fit(x, y, epoch=2)
many.predict(x, gather="last")
keras_dist.DistributedModel(model, lr_scaling="liner")
keras_dist.DistributedModel(model, lr_scalling="none")
keras_dist.ReplicaCheck(action="rase")
"""


def test_a_type_checker_finds_the_mistakes_of_a_script(tmp_path):
    """By the last eight lines, each of which is one."""
    checker = [sys.executable, "-m", "mypy", "--config-file=", "--strict"]
    options = ["--ignore-missing-imports", "--follow-imports=silent", "--cache-dir"]
    words = [*checker, *options, tmp_path / "cache", write_script(tmp_path, SCRIPT)]
    done = launch(words, env={"MYPYPATH": str(ROOT)})
    found = [int(line) for line in re.findall(r"script\.py:(\d+): error", done.stdout)]
    last = len(SCRIPT.splitlines())
    assert found == list(range(last - 7, last + 1)), done.stdout + done.stderr


def test_a_distributed_model_takes_the_arguments_of_dist_fit():
    """Its `fit` all, as `help` shows them; the class the options, by name only."""
    _, *expected = inspect.signature(keras_dist.dist_fit).parameters.values()
    _, *fit = inspect.signature(keras_dist.DistributedModel.fit).parameters.values()
    assert fit == expected
    model, *own = inspect.signature(keras_dist.DistributedModel).parameters.values()
    assert model.name == "model"
    assert own == [each for each in expected if each.kind is each.KEYWORD_ONLY]
