"""Real processes, ended by SIGKILL or SIGTERM, resume at the same step.

KILLS=20 in the environment kills so many times instead of a few.
"""

import json
import os
import random
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest
from harness.forked import alone, torchrun
from harness.launching import PYTHONPATH, ROOT, launch, start, write_script

from keras_dist.checkpoint import EXIT_CODE

NUM_ROWS = 101
KILLS = int(os.environ.get("KILLS", "0"))

# Of `resumable.KINDS`.
PIPELINES = ["shuffled", "divided", "sequence"]


def describe(folder, number, end, *, is_equivalent=False, **options):
    """One launch, which trains until `end` (kind, updates) or to the end of it."""
    given = {"folder": str(folder), "launch": number, "end": end}
    return given | {"is_equivalent": is_equivalent, "options": options}


def run(folder, number, ranks, end, **options):
    """Run it under the launcher, which passes a SIGTERM on."""
    given = json.dumps(describe(folder, number, end, **options))
    command = [ROOT / "tests" / "harness" / "resumed.py", given]
    env = {"PYTHONPATH": f"{PYTHONPATH}{os.pathsep}{ROOT / 'tests'}"}
    done = launch(command, ranks=ranks, timeout=600, env=env)
    assert (done.returncode == 0) == (end is None), done.stdout + done.stderr
    if end and end[0] == "SIGTERM":
        lines = [line for line in done.stdout.splitlines() if "exits with" in line]
        assert len(lines) == (ranks or 1), done.stdout + done.stderr
        assert all(line.endswith(f"exits with {EXIT_CODE}") for line in lines)
        assert "the same command resumes" in done.stdout
    return done


def rows_of(folder, name):
    """Rows that all ranks saw at each update, in the last launch that made it."""
    launches = defaultdict(dict)
    for path in sorted(folder.glob(f"{name}.rows.*")):
        number, rank = map(int, path.name.split(".")[-2:])
        for line in path.read_text().splitlines():
            update, rows = json.loads(line)
            launches[update].setdefault(number, {})[rank] = rows
    return {update: found[max(found)] for update, found in launches.items()}


def result_of(folder, name):
    """The numbers of the model, and the history."""
    with np.load(folder / f"{name}.npz") as file:
        state = [file[key] for key in file.files]
    return state, json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("ranks", "as_data"),
    [
        *(pytest.param(ranks, None, marks=pytest.mark.long) for ranks in (2, 3)),
        *(pytest.param(2, each, marks=pytest.mark.long) for each in PIPELINES),
    ],
)
def test_killed_processes_resume_to_the_bit(tmp_path, ranks, as_data):
    """SIGKILL to all ranks at random steps, SIGTERM to one: the results are equal."""
    options = {"save_steps": 2}
    options |= {} if as_data is None else {"as_data": as_data}
    steps = -(-NUM_ROWS // (6 * ranks)) - (as_data == "shuffled")
    choose = random.Random(ranks)
    count = KILLS or (2 if ranks == 2 else 1)
    updates = sorted(choose.sample(range(1, 3 * steps), min(count, 3 * steps - 1)))
    ends = [("SIGKILL", number) for number in updates]
    ends[count // 2] = ("SIGTERM", updates[count // 2])
    for number, end in enumerate([*ends, None]):
        run(tmp_path, number, ranks, end, **options)
    whole, cut = result_of(tmp_path, "whole"), result_of(tmp_path, "cut")
    assert len(whole[0]) == len(cut[0]) > 20
    assert all((a == b).all() for a, b in zip(whole[0], cut[0], strict=True))
    assert cut[1] == whole[1]
    rows = rows_of(tmp_path, "cut")
    assert rows == rows_of(tmp_path, "whole") and len(rows) == 3 * steps
    for epoch in range(3):
        read = [
            row
            for update in range(epoch * steps, (epoch + 1) * steps)
            for of_rank in rows[update].values()
            for row in of_rank
        ]
        least = 6 * ranks * steps if as_data == "shuffled" else NUM_ROWS - ranks + 1
        assert len(set(read)) == len(read) >= least


_RESUMED = f"""
import sys
sys.path[:0] = {[str(ROOT / "tests")]}
from harness import resumed
resumed.main({{given}})
"""


@pytest.mark.parametrize(
    "launches", [[3, 2], pytest.param([2, 3, 1], marks=pytest.mark.long)]
)
def test_another_number_of_ranks_resumes_the_same_training(
    run_ranks, tmp_path, launches
):
    """Fewer, more, and none of a launcher; a global batch of 12, two for an update."""
    options = {"lr_scaling": "none", "steps_scaling": "none", "save_steps": 1}
    options |= {"is_equivalent": True}
    for number, ranks in enumerate(launches):
        is_last = number == len(launches) - 1
        end = None if is_last else ("SIGKILL", 5 + 8 * number)
        options["batch_size"] = 12 // ranks
        given = describe(tmp_path, number, end, **options)
        variables = torchrun if ranks > 1 else alone
        done = run_ranks(variables, range(ranks), ranks, _RESUMED.format(given=given))
        codes = {code for code, _ in done}
        assert codes == {0 if is_last else -signal.SIGKILL}, done
    (expected, history), (state, resumed) = (
        result_of(tmp_path, name) for name in ("whole", "cut")
    )
    for one, other in zip(expected, state, strict=True):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)
    # A layer counts the rows of all ranks, each of which is trained on once an epoch.
    assert 3 * NUM_ROWS in [number.item() for number in state if number.size == 1]
    assert resumed.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(resumed[name], values, rtol=2e-5, err_msg=name)
    rows_of_all = {
        name: {
            update: sorted(sum(of_ranks.values(), []))
            for update, of_ranks in rows_of(tmp_path, name).items()
        }
        for name in ("whole", "cut")
    }
    assert rows_of_all["cut"] == rows_of_all["whole"]
    found = [len(rows_of(tmp_path, "cut")[n]) for n in (0, 8, 20)]
    assert list(dict.fromkeys(found)) == launches


@pytest.mark.long
@pytest.mark.parametrize("as_data", PIPELINES)
def test_killed_processes_go_on_on_other_ranks(tmp_path, as_data):
    """SIGKILL at random steps, on two or three ranks: each row once an epoch."""
    options = {"as_data": as_data, "save_steps": 1, "is_equivalent": True}
    choose = random.Random(as_data)
    updates = 2
    for number in range(KILLS or 3):
        ranks = choose.choice([2, 3])
        run(tmp_path, number, ranks, ("SIGKILL", updates), **options)
        updates += choose.choice([0, 1, 1])
    run(tmp_path, KILLS or 3, 2, None, **options)
    steps = rows_of(tmp_path, "cut").values()
    read = Counter(
        row for of_rank in steps for rows in of_rank.values() for row in rows
    )
    if as_data == "shuffled":  # the last rows of each order are left out
        assert read.total() == 3 * 96 and max(read.values()) == 3
    else:
        assert read == dict.fromkeys(range(NUM_ROWS), 3)


_TRAINS = """
import os, time
import keras, keras_dist, numpy as np

class Waits(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("trains", flush=True)
        time.sleep(60 * ("WAITS" in os.environ))

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for resume in [os.environ["FOLDER"]] * 2:
    try:
        keras_dist.dist_fit(model, np.ones((8, 1)), np.ones(8), epochs=3, verbose=0,
                            resume=resume, callbacks=[Waits()])
    except RuntimeError as error:
        print("refused", keras_dist.rank(), error, flush=True)
        raise
print("trained", flush=True)
"""


def test_a_second_job_with_the_same_folder_ends_at_once(run_ranks, tmp_path):
    """All of its ranks name the first one; when that was killed, it trains."""
    folder = tmp_path / "folder"
    script, env = write_script(tmp_path, _TRAINS), {"FOLDER": str(folder)}
    with start([script], stderr=None, env=env | {"WAITS": "1"}) as first:
        try:
            assert first.stdout.readline() == "trains\n"
            done = run_ranks(torchrun, [0, 1], 2, _TRAINS, env=env)
            named = f"process {first.pid} on host {os.uname().nodename}, since "
            for rank, (code, out) in enumerate(done):
                why = ("On rank 0: " * rank) + "Another training writes to the folder"
                assert code == 1 and f"refused {rank} {why}" in out, out
                assert named in out and "trains\n" not in out
        finally:
            first.kill()
    [(code, out)] = run_ranks(alone, [0], 1, _TRAINS, env=env)
    assert code == 0 and "trained" in out, out
    left = [name for name in os.listdir(folder) if not name.startswith("checkpoint-")]
    assert left == [".checkpoint.lock"]


def test_the_exit_code_is_documented():
    """In the README, as a number."""
    assert f"code {EXIT_CODE}" in (ROOT / "README.md").read_text()
