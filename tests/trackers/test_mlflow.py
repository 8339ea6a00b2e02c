"""One job is one run of MLflow, with the metrics of all ranks."""

import importlib

import pytest
from harness.launching import launch
from harness.needs import needs

pytestmark = needs("libraries", "mlflow")

_SCRIPT = "tests/trackers/logs_mlflow.py"
_WAYS = ("by_callback", "by_keras_autolog", "by_tensorflow_autolog", "by_autolog")
_OURS = {"rows_per_second", "effective_learning_rate"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The store of two ranks, and that of plain Keras on one process."""
    allowed = {"MLFLOW_ALLOW_FILE_STORE": "true", "GIT_PYTHON_REFRESH": "quiet"}
    stores = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in allowed.items():
            patch.setenv(name, value)
        mlflow = importlib.import_module("mlflow")
        for ranks, more in ((2, []), (None, ["plain"])):
            folder = tmp_path_factory.mktemp("mlflow")
            launch([_SCRIPT, folder, *more], ranks=ranks, timeout=500, check=True)
            stores.append(mlflow.MlflowClient(f"file:{folder}"))
        yield stores


def runs_of(store, way):
    """The runs of one experiment."""
    experiment = store.get_experiment_by_name(way)
    return list(store.search_runs([experiment.experiment_id]))


def histories(store, run):
    """Step and value of each metric of a run, in their order, but for ours."""
    return {
        name: [
            (m.step, m.value) for m in store.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
        if name not in _OURS
    }


def files_of(store, run, folder=""):
    """Names of all files and folders of a run."""
    found = []
    for entry in store.list_artifacts(run.info.run_id, folder):
        found.append(entry.path)
        if entry.is_dir:
            found += files_of(store, run, entry.path)
    return found


@pytest.mark.parametrize("way", _WAYS)
def test_a_job_is_one_run_with_metrics_and_files_of_one_process(stores, way):
    """Each value at its step, once; summary, TensorBoard's log and the model."""
    ours, plain = stores
    (run,), (expected,) = runs_of(ours, way), runs_of(plain, way)
    assert run.info.status == expected.info.status == "FINISHED"
    found, wanted = histories(ours, run), histories(plain, expected)
    assert {"loss", "mae", "val_loss", "validation_loss"} <= set(wanted)
    assert set(found) == set(wanted)
    for name, history in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in history]
        values = [value for _, value in history]
        assert [value for _, value in found[name]] == pytest.approx(values, abs=1e-5)
    assert len(files_of(ours, run)) == len(files_of(plain, expected)) > 0
    assert len(run.outputs.model_outputs) == len(expected.outputs.model_outputs)
