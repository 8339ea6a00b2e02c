"""`report=` writes what all ranks did, and changes nothing else."""

import json
import warnings
from pathlib import Path

import keras
import pytest
from claims import largest_difference

import keras_dist

PHASES = ("computing", "averaging", "waiting", "input")


@pytest.fixture
def path(tmp_path_factory):
    """One path for all ranks."""
    folder = tmp_path_factory.mktemp("report")
    return Path(keras_dist.broadcast(str(folder / "run.json")))


def content_of(path):
    """The JSON that the first rank has written, on every rank."""
    keras_dist.gather("written")
    return json.loads(path.read_text())


@pytest.mark.three_ranks
def test_a_report_has_the_history_and_the_rows_of_all_ranks(
    world, rows, make_model, path
):
    """And the model is the one of a fit without it, to the bit."""
    x, y = rows
    models, options = [], {"batch_size": 16, "epochs": 2, "verbose": 0}
    options |= {"validation_data": (x, y)}
    for report in (None, path):
        models.append(make_model())
        history = keras_dist.dist_fit(models[-1], x, y, report=report, **options)
    assert largest_difference(*models) == 0
    found = content_of(path)
    assert found["state"] == "finished" and found["size"] == world.size
    assert found["plan"] and len(found["devices"]) == world.size
    assert found["parameters"] == models[0].count_params()
    assert found["gradient_bytes"] == 4 * models[0].count_params()
    for index, epoch in enumerate(found["epochs"]):
        logs = {name: values[index] for name, values in history.history.items()}
        assert epoch["logs"] == {name: float(value) for name, value in logs.items()}
        assert epoch["rows_per_second"] == logs["rows_per_second"]
        of_ranks = [rank["rows"] for rank in epoch["ranks"]]
        assert len(of_ranks) == world.size
        assert epoch["rows"] == sum(of_ranks) * (index + 1)
        assert sum(of_ranks) == len(x)
        assert list(epoch["rates"].values()) == [pytest.approx(0.1 * world.size)]
        for rank in epoch["ranks"]:
            seconds = sum(rank[phase] for phase in PHASES)
            assert seconds == pytest.approx(rank["seconds"])
            assert rank["memory"] > 1e8 and rank["gpu_memory"] is None
        last = sum(rank["last_fraction"] for rank in epoch["ranks"])
        assert last == pytest.approx(float(world.size > 1))
    seconds = [epoch["seconds"] for epoch in found["epochs"]]
    assert 0 < seconds[0] < seconds[1]


@pytest.mark.three_ranks
@pytest.mark.slow_on_three
def test_a_report_works_in_a_list_of_callbacks_of_keras(world, rows, make_model, path):
    """`model.fit` with the callbacks of the package alone, and an early stop."""
    optimizer = keras.optimizers.SGD(0.1)
    if world.size > 1:
        optimizer = keras_dist.DistributedOptimizer(optimizer)
    model = make_model(optimizer)
    callbacks = [
        keras_dist.BroadcastVariables(),
        keras_dist.MetricAverage(),
        keras_dist.StopAtAccuracy(0.0, monitor="accuracy"),
        keras_dist.Report(path, title="a title"),
    ]
    model.fit(*rows, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    found = content_of(path)
    assert (found["title"], found["state"]) == ("a title", "stopped")
    assert len(found["epochs"]) == 1 and found["plan"] == []
    assert found["epochs"][0]["rows"] == len(rows[0]) * world.size


@pytest.mark.two_ranks
def test_a_report_that_cannot_be_written_is_an_error_before_the_first_step(
    world, rows, make_model
):
    """On all ranks, though the first one alone writes."""
    steps = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: steps.append(batch)
    )
    with pytest.raises((OSError, RuntimeError), match="/proc"):
        keras_dist.dist_fit(
            make_model(), *rows, verbose=0, callbacks=[seen], report="/proc/no/run.json"
        )
    assert steps == []
    with pytest.raises(ValueError, match=r"ends with \.html or \.json"):
        keras_dist.dist_fit(make_model(), *rows, verbose=0, report="run.pdf")


@pytest.mark.two_ranks
def test_a_training_that_resumes_has_one_report(world, rows, make_model, path):
    """With the epochs, rows and seconds of both processes."""
    options = {"batch_size": 16, "verbose": 0, "resume": str(path.parent / "saved")}
    for epochs in (1, 3):
        keras_dist.dist_fit(
            make_model(), *rows, epochs=epochs, report=path, shuffle=False, **options
        )
        content_of(path)
    found = content_of(path)
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2, 3]
    (resume,) = found["resumes"]
    assert (resume["epoch"], resume["size"]) == (2, world.size)
    rows_so_far = [epoch["rows"] for epoch in found["epochs"]]
    assert rows_so_far == [rows_so_far[0] * n for n in (1, 2, 3)]
    seconds = [epoch["seconds"] for epoch in found["epochs"]]
    assert seconds == sorted(seconds) and resume["seconds"] >= seconds[0]


@pytest.mark.two_ranks
def test_what_nan_report_has_found_is_in_the_report(world, rows, make_model, path):
    """In its words, once, on the first rank's file."""
    x, y = (array.copy() for array in rows)
    x[7] = float("nan")
    nan_report = keras_dist.NanReport("skip", path.parent / "batches")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of the first rank
        keras_dist.dist_fit(
            make_model(), x, y, epochs=2, verbose=0, callbacks=[nan_report], report=path
        )
    found = content_of(path)["nan_reports"]
    assert found == [str(each) for each in nan_report.found] != []
