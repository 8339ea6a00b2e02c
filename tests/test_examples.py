"""Every example does what its docstring says, run as a user runs it."""

import csv
import difflib
import importlib
import re
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from launch import ROOT, launch

EXAMPLES = ROOT / "examples"
FASHION_MNIST = (
    Path("/usr/share/datasets/fashion-mnist"),
    Path.home() / ".keras/datasets/fashion-mnist",
)
IMAGES = "train-images-idx3-ubyte.gz"

needs_fashion_mnist = pytest.mark.skipif(
    not any((folder / IMAGES).exists() for folder in FASHION_MNIST),
    reason="Fashion-MNIST is not on this machine (Debian: dataset-fashion-mnist)",
)


def run(name, *arguments, ranks=None):
    """The lines that an example prints, on the first rank alone."""
    command = [sys.executable, f"examples/{name}.py", *arguments]
    return lines_of(launch(command, ranks=ranks, timeout=180), ranks)


def lines_of(done, ranks):
    """The same of an example that has ended."""
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    if ranks is not None:
        assert not any(line.startswith("[1] ") for line in lines), done.stdout
    return lines


def last_number(pattern, lines):
    """The number in the last line that `pattern` fits."""
    return [float(m[1]) for line in lines if (m := re.search(pattern, line))][-1]


@pytest.mark.parametrize("ranks", [None, 2])
def test_digits_reaches_its_target_and_stops(ranks, request):
    """The quick start stops at 95 %, with and without the launcher."""
    if ranks is None:
        lines = run("digits")
    else:
        lines = lines_of(request.getfixturevalue("digits_on_two_ranks"), ranks)
    assert last_number(r"^validation accuracy ([\d.]+)%", lines) >= 95
    epochs = last_number(r"after (\d+) epochs", lines)
    assert any("rows_per_second: " in line for line in lines) and epochs < 50
    assert any(line.startswith("╭─ keras_dist") for line in lines)
    assert any("stopped after epoch" in line for line in lines)


def test_digits_without_a_line_of_ours(tmp_path):
    """`--distribute` trains the script of plain Keras to the bits of `dist_fit`."""
    source = (EXAMPLES / "digits_keras.py").read_text()
    assert "keras_dist." not in source and "import keras_dist" not in source
    ours = source.replace("import keras\n", "import keras\n\nimport keras_dist\n", 1)
    ours = ours.replace(
        "model.fit(", 'keras_dist.dist_fit(model, batch="global", x=', 1
    )
    ours = ours.replace("x=x, y,", "x=x, y=y,")
    for name, code, *option in (("plain", source, "--distribute"), ("ours", ours)):
        save = f"\nmodel.save_weights({str(tmp_path / name)!r} + '.weights.h5')\n"
        (tmp_path / f"{name}.py").write_text(code + save)
        command = [sys.executable, "-m", "keras_dist", "run", "-np", "2", *option]
        done = launch([*command, str(tmp_path / f"{name}.py")], ranks=None, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "32 global: 2 × 16 rows" in done.stdout
    models = [h5py.File(tmp_path / f"{name}.weights.h5") for name in ("plain", "ours")]
    names = []
    models[0].visit(names.append)
    arrays = [name for name in names if isinstance(models[0][name], h5py.Dataset)]
    assert arrays and all(np.array_equal(*(m[n][()] for m in models)) for n in arrays)


def test_callbacks_alone_train_on_all_ranks():
    """A script with its own `model.fit` needs nothing of `dist_fit`."""
    lines = run("callbacks_only", ranks=2)
    assert last_number(r"val_accuracy: ([\d.]+)", lines) >= 0.95
    assert not any(line.startswith("╭─ keras_dist") for line in lines)
    epochs = last_number(r"^Epoch (\d+)/", lines)
    assert last_number(r"^stopped after epoch (\d+)", lines) == epochs < 50
    assert any("rows_per_second: " in line for line in lines)


@pytest.mark.parametrize("name", ["files", "train_step"])
def test_two_ranks_print_the_result_of_one_process(name, tmp_path):
    """Files that `tf.data` decodes, and a train step that compares all rows."""
    results = []
    for ranks in (None, 2):
        folder = tmp_path / f"{ranks}"
        *_, result = run(name, *([str(folder)] if name == "files" else []), ranks=ranks)
        results.append([float(number) for number in re.findall(r"\d\.\d+", result)])
        assert results[-1] == pytest.approx(results[0], abs=2e-4) and results[0]


def test_examples_are_short():
    """A reader sees all of one at once."""
    lengths = [len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")]
    assert max(lengths) <= 80


@needs_fashion_mnist
def test_fashion_mnist_stops_itself_and_logs_once(tmp_path):
    """Two epochs in a row at the target end it; one rank writes the logs."""
    rows = 512
    lines = run(
        "fashion_mnist",
        *("--rows", str(rows), "--log-dir", str(tmp_path)),
        *("--target-accuracy", "0", "--patience", "2"),
        ranks=2,
    )
    assert any(f"{rows} → {rows // 2} per rank" in line for line in lines)
    assert last_number(r"^Epoch (\d+)/", lines) == 2
    assert last_number(r"^stopped after epoch (\d+)", lines) == 2
    with open(tmp_path / "epochs.csv") as file:
        epochs = list(csv.DictReader(file))
    assert [epoch["epoch"] for epoch in epochs] == ["0", "1"]
    assert all(float(epoch["rows_per_second"]) > 0 for epoch in epochs)
    assert len(list((tmp_path / "train").glob("events.*"))) == 1


@needs_fashion_mnist
@pytest.mark.long
def test_fashion_mnist_on_one_process_is_plain_keras():
    """The script to compare with trains without keras_dist."""
    lines = run("fashion_mnist_single", "--rows", "512", "--epochs", "2")
    assert "Epoch 2/2" in lines
    assert last_number(r"val_accuracy: ([\d.]+)", lines) > 0
    assert not any("rows_per_second" in line for line in lines)


def test_the_two_fashion_mnist_scripts_differ_in_a_few_lines():
    """Their `diff` is keras_dist and nothing else."""
    single, distributed = (
        (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2].splitlines()
        for name in ("fashion_mnist_single", "fashion_mnist")
    )
    changes = [
        line
        for line in difflib.ndiff(single, distributed)
        if line[0] in "+-" and line[1:].strip()
    ]
    assert [line for line in changes if line[0] == "-"] == ["- model.fit("]
    assert len(changes) < 20


@pytest.fixture
def module(monkeypatch):
    """Imports a module from the folder of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_the_network_has_the_width_that_is_given(module):
    """Ten times 16, 32 and 64 channels after a first convolution of 16."""
    make = module("wide_resnet").wide_resnet
    model = make(mean=0.0, variance=1.0, width=10)
    channels = [
        layer.filters
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
    ]
    assert sorted(set(channels)) == [16, 160, 320, 640]
    assert channels[0] == 16
    assert model.output_shape == (None, 10)


@needs_fashion_mnist
def test_fashion_mnist_is_read_whole(module):
    """The files on disk hold 70,000 images with ten labels, equally often."""
    (x, y), (x_val, y_val) = module("data").load_fashion_mnist()
    assert (x.shape, x_val.shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert set(np.bincount(y)) == {6000}
    assert set(np.bincount(y_val)) == {1000}


def test_data_that_cannot_be_had_is_a_clear_error(module, monkeypatch):
    """Without files and network, the error names the package and another example."""

    def fail():
        raise Exception("no network")  # what Keras raises

    data = module("data")
    monkeypatch.setattr(data, "FOLDER", Path("/nowhere"))
    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", fail)
    with pytest.raises(RuntimeError, match="no network.*dataset-fashion-mnist.*digits"):
        data.load_fashion_mnist()
