"""What the README says is true: snippets, plan, differences, commands, names."""

import difflib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import launch

import keras_dist

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# What the snippets take for granted.
_PREAMBLE = """
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
images, labels = load_digits(return_X_y=True)
x, x_val = images[:384].astype("float32") / 16, images[384:480].astype("float32") / 16
y, y_val = labels[:384], labels[384:480]
def make_model():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
"""


def blocks(language):
    """The contents of all code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_snippets_run_in_their_order(tmp_path, ranks):
    """With plain `python`, and on two ranks."""
    script = tmp_path / "script.py"
    python = blocks("python")
    assert len(python) >= 5
    head = f"import os, keras, keras_dist\nos.chdir({str(tmp_path)!r})\n" + _PREAMBLE
    script.write_text(head + "\n".join(python))
    done = launch([sys.executable, str(script)], ranks=ranks, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def test_the_snippet_that_starts_ranks_runs(tmp_path):
    """A function of the script itself, and what it returned."""
    script = tmp_path / "script.py"
    train = "def train(rate):\n    return keras_dist.sum(rate)\n"
    lines = [f"import keras_dist\n{train}", *blocks("py"), "print(losses)"]
    script.write_text("\n".join(lines))
    done = launch([sys.executable, str(script)], ranks=None, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "[0.002, 0.002]" in done.stdout


def test_the_plan_is_the_one_that_digits_prints():
    """All of it but the number of threads, which is the machine's."""
    done = launch([sys.executable, "examples/digits.py"], ranks=2, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    boxes = [re.findall(r"[╭│╰].*[╮│╯]", text) for text in (done.stdout, README)]
    printed, shown = ([line for line in box if "│ ranks" not in line] for box in boxes)
    assert shown and shown == printed


def test_the_difference_of_the_examples_is_shown():
    """Every line in which the code of the two files differs."""
    single, many = (
        (ROOT / "examples" / name).read_text().splitlines()
        for name in ("fashion_mnist_single.py", "fashion_mnist.py")
    )
    lines = difflib.unified_diff(single, many, n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("@@", "---", "+++"))]
    start = changed.index("+import keras_dist")
    (shown,) = blocks("diff")
    assert sorted(shown.splitlines()) == sorted(changed[start:])


def test_the_rules_are_all_in_the_table():
    """Every keyword-only argument of `dist_fit` with its default."""
    for parameter in inspect.signature(keras_dist.dist_fit).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = str(parameter.default)
            if isinstance(parameter.default, str):
                default = f'"{default}"'
            assert f"| `{parameter.name}` | `{default}` |" in README


def test_public_names_are_in_the_readme():
    """What is not documented is not public."""
    for name in keras_dist.__all__:
        assert name in README or name.startswith("__")


def test_the_commands_exist():
    """`make` targets, the console command and its subcommand."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("setup", "check", "test", "demo"):
        assert f"\n{target}:" in makefile
    for argument in ("--help", "--version"):
        subprocess.run(
            [sys.executable, "-m", "keras_dist", argument],
            check=True,
            capture_output=True,
        )
    helped = subprocess.run(
        [sys.executable, "-m", "keras_dist", "install-horovod", "--help"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for option in re.findall(r"`(--\w+)`", README):
        assert option in helped
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_contributing_is_short():
    """Nobody reads a long one."""
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 45
