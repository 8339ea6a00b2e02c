"""`keras-dist check`: what holds is ✔, and a planted fault fails the right line."""

import argparse
import json
import os
import sys

import pytest
from harness.launching import PYTHONPATH, launch, write_script

from keras_dist.launch.command import add_where
from keras_dist.tools.check import host
from keras_dist.tools.check.command import RANK_CHECKS, run_words
from keras_dist.tools.check.host import Result
from keras_dist.tools.check.ranks import check_alike, check_devices
from keras_dist.tools.install.recipe import Built

CHECK = [sys.executable, "-m", "keras_dist", "check"]
HOST_CHECKS = ("versions", "Horovod", "GPUs", "system", "network")

# A rank whose gradients are wrong.
WRONG_GRADIENT = """
import os
if os.environ.get("HOROVOD_RANK") == "1":
    import tensorflow as tf
    right = tf.GradientTape.gradient
    def gradient(*args, **kwargs):
        scaled = lambda each: each * 1.5 if isinstance(each, tf.Tensor) else each
        return tf.nest.map_structure(scaled, right(*args, **kwargs))
    tf.GradientTape.gradient = gradient
"""

# A rank that dies in the training.
DIES = """
import os
if os.environ.get("HOROVOD_RANK") == "1":
    import keras
    keras.layers.Embedding.call = lambda self, inputs: os._exit(3)
"""


def run_check(ranks, tmp_path, code=""):
    """Run `check`, with code planted in each process; results and output."""
    path = tmp_path / "results.json"
    write_script(tmp_path, code, "sitecustomize.py")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    done = launch([*CHECK, "-np", ranks, "--json", path], env=env)
    assert path.exists(), done.stdout + done.stderr[-3000:]
    content = json.loads(path.read_text())
    results = {each["name"]: Result(**each) for each in content["results"]}
    assert len(results) == len(content["results"]), "a check has two lines"
    assert content["passed"] == (done.returncode == 0)
    for name, result in results.items():  # the lines say what the file says
        assert f" {name} " in done.stdout and result.seen.split()[0] in done.stdout
    return results, done


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))]
)
def test_everything_passes_here(ranks, tmp_path):
    """Sums of each size have a speed, and the training is that of one process."""
    results, done = run_check(ranks, tmp_path)
    assert done.returncode == 0, done.stdout
    assert tuple(results) == (*HOST_CHECKS, *RANK_CHECKS)
    assert results["training"].status == "ok"
    if ranks > 1:
        assert results["sums"].seen.count(" GB/s)") == 5


@pytest.mark.parametrize("words", [["env"], ["run", "--help"]])
def test_a_terminal_without_utf_8_shows_all_else(words):
    """Signs that it has not are question marks."""
    command = [sys.executable, "-m", "keras_dist", *words]
    done = launch(command, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout and ("versions" in done.stdout or "SLOTS" in done.stdout)


@pytest.mark.long
def test_a_wrong_gradient_fails_the_training(tmp_path):
    """All ranks agree on what plain Keras would not train."""
    results, done = run_check(2, tmp_path, WRONG_GRADIENT)
    failed = [name for name, each in results.items() if each.status == "failed"]
    assert failed == ["training"] and done.returncode == 1, done.stdout
    assert "from plain Keras" in results["training"].seen


@pytest.mark.long
def test_a_rank_that_dies_fails_the_check_that_was_running(tmp_path):
    """And the launcher's report is shown."""
    results, done = run_check(2, tmp_path, DIES)
    assert results["sums"].status == "ok", done.stdout
    assert results["training"].status == "failed"
    assert "ended with exit code" in results["training"].seen
    assert "exit code 3" in done.stderr


BUILT = Built("0.28.1", "2.21.0", "2.21.0", mpi=False, nccl=True, cuda="12.5.1")
H100 = "NVIDIA H100, driver 580.95"


@pytest.mark.parametrize(
    ("gpus", "error", "changed", "status", "text"),
    [
        ([H100, H100], "", {}, "ok", "2 × NVIDIA H100, driver 580.95"),
        ([H100], "", {"nccl": False}, "warning", "install-horovod --nccl"),
        ([H100], "", {"cuda": ""}, "failed", "tensorflow[and-cuda]"),
        ([], "no devices", {}, "warning", "nvidia-smi lists none: no devices"),
        ([], "", {}, "ok", "no nvidia-smi"),
    ],
)
def test_a_gpu_needs_cuda_and_nccl(gpus, error, changed, status, text):
    """Without one of them the line says what to install."""
    built = Built(**(vars(BUILT) | changed))
    result = host.check_gpus(gpus, error, built)
    assert result.status == status and text in result.seen + result.cure
    assert bool(result.cure) == (status in ("failed", "warning"))


@pytest.mark.parametrize(
    ("output", "code", "gpus", "error"),
    [
        ("NVIDIA H100, 580.95", 0, [H100], ""),
        ("No devices were found", 0, [], "No devices were found"),
        ("NVIDIA-SMI has failed, because", 9, [], "NVIDIA-SMI has failed, because"),
        ("", 0, [], "exit code 0, no output"),
    ],
)
def test_gpus_are_listed_by_nvidia_smi(
    output, code, gpus, error, tmp_path, monkeypatch
):
    """Or what it says instead; without the program there is no GPU, and no error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.list_gpus() == ([], "")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    program.chmod(0o755)
    assert host.list_gpus() == (gpus, error)


def test_what_is_not_installed_is_named():
    """With the command that installs it; another TensorFlow is a warning."""
    versions = {"Python": "3.13.1", "TensorFlow": "2.21.0", "Keras": "3.15.1"}
    assert host.check_versions(versions).status == "ok"
    for other in ("2.17.1", "2.22.0"):
        result = host.check_versions({**versions, "TensorFlow": other})
        assert result.status == "warning" and "was tried with" in result.cure
    missing = host.check_versions({**versions, "Keras": ""})
    assert missing.status == "failed" and "Keras none" in missing.seen
    assert "pip install" in missing.cure
    assert host.check_versions({**versions, "Horovod": ""}).status == "ok"


def test_a_horovod_that_cannot_be_imported_or_is_not_ours_says_what_to_do():
    """Each by `install-horovod`."""
    assert host.check_horovod(None, "undefined symbol").status == "failed"
    plain = host.check_horovod(BUILT, "")
    assert plain.status == "warning" and "install-horovod" in plain.cure
    patched = Built(**(vars(BUILT) | {"is_patched": True}))
    assert host.check_horovod(patched, "").status == "ok"


def rank(**changed):
    """What a rank with a GPU says of itself."""
    gpu = {"has_gpu": True, "device": "GPU 0 H100", "num_gpus": 2}
    return {"host": "a", "cores": [0]} | gpu | changed


CPU = {"has_gpu": False, "device": "CPU", "num_gpus": 0}


@pytest.mark.parametrize(
    ("first", "second", "status", "seen"),
    [
        ({}, {"device": "GPU 1 H100"}, "ok", "GPU 0 H100 on rank 0, GPU 1 H100 on"),
        ({}, {"host": "b"}, "ok", "GPU 0 H100 on ranks 0, 1 (a, b)"),
        ({}, {}, "failed", "several ranks have one GPU"),
        ({}, {**CPU, "num_gpus": 2}, "failed", "sees none of 2 GPUs on rank 1"),
        ({}, CPU, "failed", "some ranks have no GPU"),
        (CPU, {**CPU, "cores": [1]}, "ok", "CPU on ranks 0, 1"),
        (CPU, CPU, "warning", "use the same cores"),
    ],
)
def test_each_rank_has_a_device_of_its_own(first, second, status, seen):
    """A GPU, or cores."""
    facts = [rank(**first), rank(**second)]
    result = check_devices(facts, [each["host"] for each in facts])
    assert result.status == status and seen in result.seen, result.seen
    assert bool(result.cure) == (status != "ok")


def test_versions_that_differ_are_named_with_their_ranks():
    """And hosts."""
    assert check_alike(["TensorFlow 2.21.0"] * 2, ["a", "b"]).status == "ok"
    other = check_alike(["TensorFlow 2.21.0", "TensorFlow 2.20.0"], ["a", "b"])
    assert other.status == "failed" and other.cure
    assert "TensorFlow 2.20.0 on rank 1 (b)" in other.seen


def test_the_options_of_run_reach_the_ranks(monkeypatch):
    """As they were given; without any, there are two ranks or one for each GPU."""
    parser = argparse.ArgumentParser()
    add_where(parser)
    given = ["-H", "a:1,b:1", "--rdzv", "10.0.0.1:29400"]
    assert run_words(parser.parse_args(given)) == given
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert run_words(parser.parse_args([])) == ["-np", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_words(parser.parse_args([])) == ["-np", "2"]
