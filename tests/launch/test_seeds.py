"""A script without a seed draws the same on all ranks, before and after a fit.

And a set of text has the same order there.
"""

import re

from harness.launching import launch, prefix, write_script

# No package of ours: seeded before the script's first line.
DRAWS = """
import random, sys
import numpy as np
if "seeds" in sys.argv:
    random.seed(3); np.random.seed(4)
print("drawn", random.random(), np.random.rand(), np.random.randn())
print("set", list({f"word {number}" for number in range(20)}))
"""

TRAINS = """
import random
import numpy as np
import keras
from sklearn.model_selection import train_test_split
import keras_dist

x = np.arange(200.0).reshape(100, 2)
x, x_val, y, y_val = train_test_split(x, x[:, :1])
print("split", x[:3].tolist())
for _ in range(2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    keras_dist.dist_fit(model, x, y, validation_data=(x_val, y_val), verbose=0)
    print("after", random.random(), np.random.rand())
"""


def lines(done, word):
    """What two ranks have printed behind a word: a list of each rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    begins = [f"^{re.escape(prefix(rank))}{word} (.*)" for rank in range(2)]
    return [re.findall(begin, done.stdout, re.M) for begin in begins]


def test_the_first_draws_of_a_script(tmp_path):
    """The same on all ranks, others at each start; one that sets a seed has its own."""

    command = [write_script(tmp_path, DRAWS)]

    def draw(*arguments, **env):
        done = launch([*command, *arguments], ranks=2, env=env)
        first, second = lines(done, "set")
        assert first == second != []  # the order of a vocabulary
        return lines(done, "drawn")

    one, other = draw(), draw()
    assert one[0] == one[1] and other[0] == other[1] and one[0] and one != other
    fixed = [draw(KERAS_DIST_SEED=seed) for seed in "778"]
    assert fixed[0] == fixed[1] != fixed[2] and fixed[0][0] == fixed[0][1]
    seeded = draw("seeds", KERAS_DIST_SEED="7")
    assert seeded[0] == seeded[1] == draw("seeds")[0]
    assert seeded[0][0].startswith("0.23796462709189137 ")  # random.seed(3)
    done = launch(command, ranks=2, env={"KERAS_DIST_SEED": "tea"})
    assert done.returncode == 1
    assert "must be a whole number" in done.stderr and "=tea" in done.stderr


def test_a_split_without_a_seed(tmp_path):
    """Equal before and after each fit; `verbose=0` says once that there are ranks."""
    done = launch([write_script(tmp_path, TRAINS)], ranks=2)
    assert done.stdout.count(": fit runs on 2 ranks\n") == 1, done.stdout
    for word in ("split", "after"):
        first, second = lines(done, word)
        assert first == second != [], done.stdout
