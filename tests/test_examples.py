"""Every example does what its docstring says, run as a user runs it."""

import csv
import importlib
import os
import re
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from harness.launching import ROOT, launch
from harness.pages import has_fashion_mnist

needs_fashion_mnist = pytest.mark.skipif(
    not has_fashion_mnist(),
    reason="Fashion-MNIST is not on this machine (Debian: dataset-fashion-mnist)",
)


@pytest.fixture(params=["on_one_process", "on_two_ranks"])
def printed(request):
    """What examples print, without a launcher and with it."""
    return request.getfixturevalue(request.param)


def last_number(pattern, lines):
    """The number in the last line that `pattern` fits."""
    return [float(m[1]) for line in lines if (m := re.search(pattern, line))][-1]


def test_digits_reaches_its_target_and_stops(printed):
    """The quick start stops at 95 %."""
    lines = printed["examples/digits.py"]
    assert not [line for line in lines if line.startswith("[1] ")]
    assert last_number(r"^validation accuracy ([\d.]+)%", lines) >= 95
    epochs = last_number(r"after (\d+) epochs", lines)
    assert any("rows_per_second: " in line for line in lines) and epochs < 50
    assert any(line.startswith("╭─ keras_dist") for line in lines)
    assert any("stopped after epoch" in line for line in lines)


def test_a_script_for_one_process_prints_the_same_on_any_number_of_ranks():
    """Four digits of each loss, and the epoch after which it stops by itself."""
    script = "examples/digits_keras.py"
    printed = []
    for ranks in (None, 2, 3):
        how = [] if ranks is None else ["--distribute"]
        done = launch([*how, script], ranks=ranks, check=True)
        printed += re.findall(r"losses (.*)|validation accuracy (.*)", done.stdout)
    assert len(printed) == 2 * (1 + 2 + 3) and len(set(printed)) == 2
    assert len(printed[0][0].split()) > 5


def test_digits_without_a_line_of_ours(on_two_ranks, written):
    """`--distribute` trains the script of plain Keras to the bits of `dist_fit`."""
    done = launch(["--distribute", written / "plain.py"], ranks=2, check=True)
    for printed in (done.stdout, "\n".join(on_two_ranks[str(written / "ours.py")])):
        assert "64 global: 2 × 32 rows" in printed
    models = [h5py.File(written / f"{name}.weights.h5") for name in ("plain", "ours")]
    names = []
    models[0].visit(names.append)
    arrays = [name for name in names if isinstance(models[0][name], h5py.Dataset)]
    assert arrays and all(np.array_equal(*(m[n][()] for m in models)) for n in arrays)


def test_callbacks_alone_train_on_all_ranks(on_two_ranks):
    """A script with its own `model.fit` needs nothing of `dist_fit`."""
    lines = on_two_ranks["examples/callbacks_only.py"]
    assert last_number(r"val_accuracy: ([\d.]+)", lines) >= 0.95
    assert not any(line.startswith("╭─ keras_dist") for line in lines)
    epochs = last_number(r"^Epoch (\d+)/", lines)
    assert last_number(r"^stopped after epoch (\d+)", lines) == epochs < 50
    assert any("rows_per_second: " in line for line in lines)


def test_a_reader_can_falsify_what_we_say_of_horovod():
    """The ranks of its optimizer have other weights each, and ours the same."""
    done = launch(["examples/falsify.py"], ranks=2, check=True)
    found = re.findall(r"^rank . of 2: (\S+) (\w{12})$", done.stdout, re.MULTILINE)
    weights = {
        name: {digest for each, digest in found if each == name} for name, _ in found
    }
    assert len(found) == 4 and list(map(len, weights.values())) == [2, 1]


def test_a_killed_rank_changes_no_bit():
    """The same command goes on to the weights of an undisturbed training."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = launch(["bash", "examples/failure.sh"], env={"PATH": path}, check=True)
    undisturbed, resumed = re.findall(r"^weights (\w+)$", done.stdout, re.MULTILINE)
    assert undisturbed == resumed and "SIGKILL" in done.stdout + done.stderr
    (seconds,) = re.findall(
        r"^exit code 137, (\d+) s after the kill$", done.stdout, re.M
    )
    assert int(seconds) < 20
    assert "continues" in done.stdout


@pytest.mark.parametrize("name", ["files", "train_step"])
def test_two_ranks_print_the_result_of_one_process(name, on_one_process, on_two_ranks):
    """Files that `tf.data` decodes, and a train step that compares all rows."""
    one, two = (
        [float(n) for n in re.findall(r"\d\.\d+", printed[f"examples/{name}.py"][-1])]
        for printed in (on_one_process, on_two_ranks)
    )
    assert two == pytest.approx(one, abs=2e-4) and one


@pytest.mark.parametrize("name", ["tape", "loader"])
def test_a_trainer_of_a_package_prints_the_loss_of_one_process(
    name, on_one_process, on_two_ranks
):
    """A `GradientTape` loop, and a `fit` with a generator of its own."""
    page, pattern = "docs/how_to/trainers.md", rf"^{name} ([\d.]+)"
    one, two = (
        last_number(pattern, printed[page])
        for printed in (on_one_process, on_two_ranks)
    )
    assert two == pytest.approx(one, abs=2e-6)


@needs_fashion_mnist
def test_fashion_mnist_stops_itself_and_logs_once(on_two_ranks, written):
    """Two epochs in a row at the target end it; one rank writes the logs."""
    lines = on_two_ranks["examples/fashion_mnist.py"]
    assert any("256 → 128 per rank" in line for line in lines)
    assert last_number(r"^Epoch (\d+)/", lines) == 2
    assert last_number(r"^stopped after epoch (\d+)", lines) == 2
    with open(written / "epochs.csv") as file:
        epochs = list(csv.DictReader(file))
    assert [epoch["epoch"] for epoch in epochs] == ["0", "1"]
    assert all(float(epoch["rows_per_second"]) > 0 for epoch in epochs)
    assert len(list((written / "train").glob("events.*"))) == 1


@pytest.fixture
def data(monkeypatch):
    """The module `data` of the examples."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("data")


@needs_fashion_mnist
def test_fashion_mnist_is_read_whole(data):
    """The files on disk hold 70,000 images with ten labels, equally often."""
    (x, y), (x_val, y_val) = data.load_fashion_mnist()
    assert (x.shape, x_val.shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert set(np.bincount(y)) == {6000}
    assert set(np.bincount(y_val)) == {1000}


def test_data_that_cannot_be_had_is_a_clear_error(data, monkeypatch):
    """Without files and network, the error names the package and another example."""

    def fail():
        raise Exception("no network")  # what Keras raises

    monkeypatch.setattr(data, "FOLDER", Path("/nowhere"))
    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", fail)
    with pytest.raises(RuntimeError, match="no network.*dataset-fashion-mnist.*digits"):
        data.load_fashion_mnist()
