"""`dist_fit(timeline=…)` in a process of its own: Horovod must not have started."""

import json
import sys

from launch import launch

_SCRIPT = """
import sys
import keras, keras_dist, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rows = np.ones((90, 2)), np.ones(90)
for number in range(2):
    path = f"{sys.argv[1]}/{number}.json"
    keras_dist.dist_fit(model, *rows, batch_size=9, verbose=0, timeline=path)
try:
    keras_dist.dist_fit(model, *rows, timeline=f"{sys.argv[1]}/no/where.json")
except (OSError, RuntimeError) as error:
    print("it raised", error)
"""


def test_a_timeline_shows_the_collectives(tmp_path):
    """Of each fit its own, whole; a file that cannot be written is an error on all."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = launch([sys.executable, str(script), str(tmp_path)], ranks=2, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for number in range(2):
        events = json.loads((tmp_path / f"{number}.json").read_text())
        names = [event.get("name") for event in events]
        sums = [name for name in names if name in ("GLOO_ALLREDUCE", "MPI_ALLREDUCE")]
        assert len(sums) >= 5, names
    raised = [line for line in done.stdout.splitlines() if "it raised" in line]
    assert len(raised) == 2 and all("where.json" in line for line in raised)
