"""`keras-dist scale`: its numbers, what it says limits, and a study that goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from launch import ROOT, launch
from test_report import cells_of, embedded, run_of, training_of

from keras_dist import __main__ as command
from keras_dist.report.training import VARIABLE
from keras_dist.tools.scale.command import with_words
from keras_dist.tools.scale.results import (
    Step,
    fitted,
    predicted,
    price_of,
    results_of,
)
from keras_dist.tools.scale.runs import Folder, facts_of

SCALE = [sys.executable, "-m", "keras_dist", "scale"]

# On two ranks it fails as long as there is no file "ready".
SCRIPT = """
import os, sys
from pathlib import Path
folder = Path(__file__).parent
if os.environ["HOROVOD_SIZE"] == "2" and not (folder / "ready").exists():
    raise OSError("the disk is not there")
if (folder / "sleep").exists():
    import time
    time.sleep(60)
import keras, keras_dist, numpy as np
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
keras_dist.dist_fit(
    model, x, y, batch_size=16, epochs=50, verbose=0, validation_data=(x, y)
)
sys.exit(3 * ("exit" in sys.argv))
"""


def options_of(*words):
    """The options of a command, and its script's words."""
    options = command._parser().parse_args(["scale", *words])
    return with_words(options)


@pytest.fixture
def script(tmp_path):
    """A small script that trains."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_options_may_stand_before_and_behind_the_script(script):
    """Behind it, the script's own are behind `--`."""
    first, words = options_of("-np", "1,2", "--epochs", "3", str(script), "--rows", "5")
    assert (first.np, first.epochs, words) == ([1, 2], 3, [str(script), "--rows", "5"])
    _, words = options_of("-np", "1,2", "--", str(script), "--", "-v")
    assert words == [str(script), "--", "-v"]
    later, words = options_of(str(script), "-np", "2,1,2", "--epochs", "3", "--", "-v")
    assert (later.np, later.epochs, words) == ([1, 2], 3, [str(script), "-v"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-np", "2"], "A script and numbers of ranks"),
        (["{script}"], "A script and numbers of ranks"),
        (["-np", "2", "missing.py"], "There is no such script"),
        (["-np", "2", "--output", "a.pdf", "{script}"], "ends with .html or .json"),
        (["-np", "2", "--price", "cheap", "{script}"], "A price is that of an hour"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(script, words, error, capsys):
    """With what was received, and the exit code 1."""
    words = [word.format(script=script) for word in words]
    assert command.main(["scale", *words]) == 1
    message = capsys.readouterr().err
    assert error in message and "Received" in message
    assert not list(script.parent.glob("*.runs"))


def test_efficiency_is_that_of_a_rank_relative_to_the_fewest_ranks():
    """Medians of all epochs of all runs, with the lowest and the highest."""
    runs = [run_of(1), run_of(1, 2), run_of(4, speed=0.5), run_of(4, 2, speed=0.25)]
    one, four = results_of(runs)["by_ranks"]
    assert one["rows_per_second"] == {"median": 50.0, "low": 49.0, "high": 51.0}
    assert one["efficiency"] == {"median": 1.0, "low": 0.98, "high": 1.02}
    rates = [96 + n for n in (1, 2, 3)] + [48 + n for n in (1, 2, 3)]
    assert four["rows_per_second"]["low"] == min(rates)
    assert four["efficiency"]["high"] == max(rates) / 4 / 50
    assert (one["runs"], four["runs"]) == (2, 2)


def test_times_to_a_target_are_over_seconds_rows_and_epochs():
    """And say how many runs have reached it."""
    runs = [run_of(1), run_of(2, accuracies=(0.6, 0.7)), run_of(2, 2)]
    one, two = results_of(runs, target=0.75)["by_ranks"]
    assert one["to_target"]["seconds"]["median"] == 6.0
    assert one["to_target"]["rows"]["median"] == 2 * 96
    assert two["to_target"]["reached"] == 1
    assert two["to_target"]["epochs"]["median"] == 2
    never = results_of(runs, target=0.99)["by_ranks"][0]["to_target"]
    assert never["reached"] == 0 and never["seconds"] is None


def test_a_fit_finds_the_model_that_made_its_data():
    """Each of the two forms, with a constant and without."""
    for form, grow in (
        ("bandwidth", lambda n: 2 * (n - 1) / n),
        ("latency", lambda n: 2 * (n - 1)),
    ):
        for constant in (0.0, 0.003):
            steps = [
                Step(n, 32 * n, constant + 0.004 * grow(n), 0.1) for n in (2, 4, 8)
            ]
            found = fitted(form, steps)
            assert found.constant == pytest.approx(constant, abs=1e-12)
            assert found.factor == pytest.approx(0.004)
            assert found.seconds(64) == pytest.approx(constant + 0.004 * grow(64))


def test_a_fit_has_no_negative_number():
    """Averaging that gets shorter with more ranks is noise."""
    shorter = [Step(2, 64, 0.2, 1.0), Step(4, 128, 0.1, 1.0)]
    for form in ("bandwidth", "latency"):
        found = fitted(form, shorter)
        assert found.factor == 0 and found.constant == pytest.approx(0.15)
        steep = fitted(form, [Step(2, 64, 0.01, 1.0), Step(4, 128, 9.0, 1.0)])
        assert steep.constant == 0 and steep.factor > 0


def test_a_prediction_lies_between_its_two_forms():
    """From the most ranks that were measured on, and none from one rank alone."""
    steps = [Step(1, 32, 0.0, 0.1), Step(2, 64, 0.02, 0.1), Step(4, 128, 0.03, 0.1)]
    found = predicted(steps, 320.0)
    assert [point["ranks"] for point in found["points"]] == [4, 8, 16, 32, 64]
    for point in found["points"]:
        assert point["rows_per_second"]["low"] <= point["rows_per_second"]["high"]
        assert point["efficiency"]["high"] <= 1
    at_four = found["points"][0]["rows_per_second"]
    assert at_four["low"] == pytest.approx(128 / 0.13)
    assert at_four["high"] == pytest.approx(128 / 0.13)
    assert any("32 rows" in text for text in found["assumptions"])
    assert predicted(steps[:1], 320.0) is None


def test_what_limits_is_said_in_words():
    """Each reason by the number of ranks for which it holds."""
    words = results_of([run_of(1), run_of(2, accuracies=(0.2, 0.3))], target=0.5)
    text = "\n".join(words["limits"])
    assert "On 2 ranks: 1.95 times the rows per second of 1 rank" in text
    assert "averaging: 12 % of the time" in text
    assert "On 2 ranks val_accuracy has not reached 0.5" in text
    slow = results_of(
        [run_of(1), run_of(2, accuracies=(0.1, 0.2, 0.3, 0.6))], target=0.5
    )
    assert "after 8.00 times as many rows as on 1 rank" in "\n".join(slow["limits"])
    worse = results_of([run_of(1), run_of(2, accuracies=(0.2, 0.3))])["limits"]
    assert "On 2 ranks val_accuracy comes to 0.3, and on 1 rank to 0.9" in worse[-1]


@pytest.mark.parametrize(
    ("text", "shown", "cost"),
    [
        ("2.5/hour", "2.5/hour for each rank", 10.0),
        ("$2.5/hour/gpu", "$2.5/hour for each rank", 10.0),
        ("10 EUR/h/host", "EUR10/hour for each host", 20.0),
    ],
)
def test_prices_are_those_of_ranks_or_hosts(text, shown, cost):
    """Of 4 ranks on 2 hosts for an hour."""
    price = price_of(text)
    assert str(price) == shown
    assert price.of(3600, ranks=4, hosts=2) == cost


def test_a_folder_is_of_one_study(tmp_path, script):
    """Its script, arguments and settings; the numbers of ranks may change."""
    facts = facts_of([str(script)], epochs=2)
    Folder(tmp_path / "runs", facts)
    Folder(tmp_path / "runs", facts)
    with pytest.raises(ValueError, match="where epochs was another"):
        Folder(tmp_path / "runs", facts | {"epochs": 3})
    script.write_text("pass")
    with pytest.raises(ValueError, match="where content was another"):
        Folder(tmp_path / "runs", facts_of([str(script)], epochs=2))


def test_of_several_fits_the_one_with_the_most_rows_counts(tmp_path, script):
    """A script may fit a small model first."""
    folder = Folder(tmp_path / "runs", facts_of([str(script)]))
    for number, accuracies in ((1, (0.1,)), (2, (0.1, 0.2))):
        name = "2-1.json" if number == 1 else f"2-1.{number}.json"
        content = training_of(2, accuracies=accuracies)
        (folder.path / name).write_text(json.dumps(content))
    assert len(folder.training(2, 1)["epochs"]) == 2


def test_a_study_goes_on_and_its_page_has_the_numbers_of_its_json(script):
    """A run that failed is in the report; the next start repeats it, and it alone."""
    output = script.with_name("scale.html")
    words = [*SCALE, "-np", "1,2", "--epochs", "2", "--price", "3.6/hour"]
    words += ["--output", str(output), str(script), "exit"]
    done = launch(words, ranks=None, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(output.with_suffix(".json").read_text())
    states = [(run["ranks"], run["state"]) for run in content["runs"]]
    assert states == [(1, "finished"), (2, "failed")]
    assert "the disk is not there" in content["runs"][1]["cause"]
    assert "the disk is not there" in output.read_text()
    # The exit code of the script, after its training.
    assert "exit code 3" in content["runs"][0]["cause"]

    script.with_name("ready").touch()
    first = output.with_suffix(".runs") / "1-1.json"
    before = first.stat().st_mtime_ns
    done = launch(words, ranks=None, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(of an earlier start)" in done.stdout
    assert first.stat().st_mtime_ns == before
    content = json.loads(output.with_suffix(".json").read_text())
    page = output.read_text()
    data, charts = embedded(page)
    assert data == content and charts
    assert [row["ranks"] for row in content["by_ranks"]] == [1, 2]
    for run, cells in zip(content["runs"], cells_of(page, "Runs")[1:], strict=True):
        training = run["training"]
        assert training["state"] == "finished" and training["epochs_planned"] == 2
        assert training["size"] == run["ranks"] == int(cells[0])
        assert [epoch["rows"] for epoch in training["epochs"]] == [256, 512]
        for epoch in training["epochs"]:
            for rank in epoch["ranks"]:
                phases = [
                    rank[p] for p in ("computing", "averaging", "waiting", "input")
                ]
                assert sum(phases) == pytest.approx(rank["seconds"])
    for row in content["by_ranks"]:
        spent = row["seconds"]["median"] * row["ranks"] / 1000
        assert row["cost"]["run"] == pytest.approx(spent)


@pytest.mark.long
def test_a_study_with_repeats_compares_the_times_to_its_target(script):
    """Each run ends at the target; the page has medians and costs of both."""
    output = script.with_name("scale.html")
    words = [*SCALE, "-np", "1", "--repeats", "2", "--target-accuracy", "0.1"]
    words += ["--price", "$3.6/hour", "--output", str(output), str(script)]
    done = launch(words, ranks=None, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(output.with_suffix(".json").read_text())
    assert [(run["ranks"], run["repeat"]) for run in content["runs"]] == [
        (1, 1),
        (1, 2),
    ]
    assert (content["repeats"], content["planned"], content["target"]) == (2, 2, 0.1)
    assert content["price"]["text"] == "$3.6/hour for each rank"
    for run in content["runs"]:
        epochs = run["training"]["epochs"]
        assert run["training"]["state"] == "stopped"
        assert len(epochs) < run["training"]["epochs_planned"] == 50
        assert epochs[-1]["logs"][content["metric"]] >= 0.1
    (row,) = content["by_ranks"]
    assert (row["runs"], row["to_target"]["reached"]) == (2, 2)
    assert row["cost"]["run"] == pytest.approx(row["seconds"]["median"] / 1000)
    page = output.read_text()
    assert embedded(page)[0] == content
    assert cells_of(page, "Speed")[1][:3] == ["1", "1", "2"]
    (cells,) = cells_of(page, "Where the time goes")[1:]
    assert cells[-2] == f"{row['cost']['run']:.3g}"
    assert "2 of 2 runs" in page and "$3.6/hour" in page


@pytest.mark.long
def test_ctrl_c_ends_the_ranks_and_the_next_start_goes_on(script):
    """What has finished is not run again."""
    script.with_name("ready").touch()
    output = script.with_name("scale.json")
    words = [
        *SCALE,
        "-np",
        "1,2",
        "--epochs",
        "1",
        "--output",
        str(output),
        str(script),
    ]
    sleep = script.with_name("sleep")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "✔ 1 rank" in line:
            sleep.touch()
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            break
    assert process.wait(60) == 130
    ours = [pid for pid in os.listdir("/proc") if pid.isdecimal() and _is_run(pid)]
    assert not ours
    sleep.unlink()
    done = launch(words, ranks=None, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✔ 1 rank" in done.stdout and "(of an earlier start)" in done.stdout


def _is_run(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return VARIABLE.encode() in file.read()
    except OSError:
        return False
