"""`keras-dist check`: what holds is ✔, and a planted fault fails the right line."""

import argparse
import io
import json
import os
import re
import sys

import pytest
from launch import PYTHONPATH, launch

from keras_dist import __main__ as command
from keras_dist.tools.check import environment, gpus, network
from keras_dist.tools.check.checks import (
    FAILED,
    OK,
    STAGES,
    UNTRIED,
    WARNING,
    Result,
    result_in,
)
from keras_dist.tools.check.collectives import between_hosts
from keras_dist.tools.check.command import (
    lines_of,
    rank_words,
    show_result,
    summary_of,
)
from keras_dist.tools.launcher import reason_in
from keras_dist.tools.screen import Screen

CHECK = [sys.executable, "-m", "keras_dist", "check"]
ENV = [sys.executable, "-m", "keras_dist", "env"]

# A rank whose gradients are wrong.
WRONG_GRADIENT = """
import os
if os.environ.get("HOROVOD_RANK") == "1":
    import tensorflow as tf
    right = tf.GradientTape.gradient
    def gradient(*args, **kwargs):
        found = right(*args, **kwargs)
        scaled = lambda each: each * 1.5 if tf.is_tensor(each) else each
        return tf.nest.map_structure(scaled, found)
    tf.GradientTape.gradient = gradient
"""

# A rank that dies in one check, and hangs in two others.
DIES_AND_HANGS = """
import os, time
if os.environ.get("HOROVOD_RANK") == "1":
    import keras
    def dies(self, inputs):
        os._exit(3)
    def hangs(self, inputs):
        time.sleep(1000)
    keras.layers.Embedding.call = dies
    keras.layers.Conv2D.call = hangs
"""

# One GPU for all ranks, on which the caller computes.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "0, GPU-5a, NVIDIA H100, 81559, 1024, 550.54, 5, 16" ;;
*) echo "GPU-5a, $PPID, 512" ;;
esac
"""


def checked(words, tmp_path, *, timeout=600, env=None):
    """Run `check` or `env`; its results by group and name, exit code and output."""
    path = tmp_path / "found.json"
    done = launch([*words, "--json", str(path)], ranks=None, timeout=timeout, env=env)
    assert path.exists(), done.stdout + done.stderr[-3000:]
    found = json.loads(path.read_text())
    results = {(r["group"], r["name"]): Result(**r) for r in found["results"]}
    assert len(results) == len(found["results"]), "a check has two lines"
    assert found["holds"] == (done.returncode == 0)
    for key, result in results.items():  # the lines say what the file says
        assert f" {key[1]} " in done.stdout and result.seen.split()[0] in done.stdout
    return results, done


def failed(results):
    """The checks that have failed."""
    return {key for key, result in results.items() if result.status == FAILED}


def planted(tmp_path, code):
    """Variables with which this code runs in each Python process at its start."""
    (tmp_path / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}


def test_env_finds_two_ranks_equal(tmp_path):
    """Versions, code, network and clocks, by a real launch; the script is hashed."""
    script = ["examples/digits.py"]
    results, done = checked([*ENV, "-np", "2", *script], tmp_path, timeout=120)
    assert not failed(results), done.stdout
    assert list(results) == list(STAGES[0].checks)
    assert done.returncode == 0
    assert "2 ranks" in results["environment", "start"].seen
    assert "examples/digits.py" in results["environment", "code"].seen


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_everything_holds_here(ranks, tmp_path):
    """Each check but the speed, in a folder of the user's, which is left empty."""
    folder = tmp_path / "resume"
    folder.mkdir()
    words = [*CHECK, "-np", str(ranks), "--no-speed", "--resume-folder", str(folder)]
    results, done = checked(words, tmp_path)
    assert not failed(results) and done.returncode == 0, done.stdout
    assert list(results) == [key for stage in STAGES[:-1] for key in stage.checks]
    assert results["resume", "resume"].status == OK
    for name in ("CNN", "Embedding", "float16", "XLA"):
        assert results["truth", name].status == OK
        assert results["truth", name].data["difference"] <= 4e-3
    assert not list(folder.iterdir())


@pytest.mark.long
def test_speed_is_measured_on_one_and_on_two_ranks(tmp_path):
    """With an efficiency for both models."""
    results, done = checked(
        [*CHECK, "-np", "2", "--only", "speed"], tmp_path, timeout=900
    )
    assert not failed(results), done.stdout
    for name in ("ResNet-50", "transformer"):
        rates = results["speed", name].data["rows_per_second"]
        assert set(rates) == {"1", "2"} and min(rates.values()) > 0


@pytest.mark.long
def test_a_wrong_gradient_and_a_shared_gpu_fail_their_lines(tmp_path):
    """A rank that computes wrongly, and a listing in which two ranks have one GPU."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    env = planted(tmp_path, WRONG_GRADIENT)
    env["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = [*CHECK, "-np", "2", "--only", "devices,truth"]
    results, done = checked(words, tmp_path, env=env)
    truth = {key for key in results if key[0] == "truth"}
    assert failed(results) == {("devices", "device"), *truth}, done.stdout
    device, gradient = results["devices", "device"], results["truth", "gradient"]
    assert "GPU-5a: ranks 0, 1" in device.seen and device.cure
    assert "rank 1 and rank 0" in gradient.seen
    assert done.returncode == 1


@pytest.mark.long
def test_a_rank_that_dies_or_hangs_fails_one_line(tmp_path):
    """The checks before and after it are tried."""
    words = [*CHECK, "-np", "2", "--only", "truth", "--time-limit", "110"]
    env = planted(tmp_path, DIES_AND_HANGS)
    results, done = checked(words, tmp_path, env=env, timeout=900)
    # The model of `CNN` is that of `gradient`, too.
    names = {"gradient", "CNN", "Embedding"}
    assert failed(results) == {("truth", name) for name in names}, done.stdout
    assert "did not end in 110 s" in results["truth", "CNN"].seen
    assert "exit code 3" in results["truth", "Embedding"].seen
    assert results["truth", "XLA"].status == OK


FACTS = {
    "host": "a",
    "local_rank": 0,
    "versions": {"Python": "3.13.1", "TensorFlow": "2.21.0", "Horovod": "0.28.1"},
    "imported": "2.21.0",
    "is_supported": True,
    "errors": {},
    "built": ["gloo"],
    "nccl": 0,
    "cuda": {},
    "driver": "",
    "gpus": [],
    "is_patched": True,
    "code": {"keras_dist": "1f"},
    "system": {},
}
OTHER = {"Python": "3.13.1", "TensorFlow": "2.20.0", "Horovod": "0.28.1"}


@pytest.mark.parametrize(
    ("name", "own", "status", "seen"),
    [
        ("versions", {}, OK, "TensorFlow 2.21.0"),
        ("versions", {"versions": OTHER}, FAILED, "2.20.0 on rank 1 (b)"),
        ("versions", {"imported": "2.20.0"}, FAILED, "2.20.0 on rank 1 (b)"),
        ("Horovod", {}, OK, "Gloo"),
        ("Horovod", {"built": ["gloo", "mpi"]}, FAILED, "Gloo, MPI on rank 1 (b)"),
        ("Horovod", {"errors": {"Horovod": "no .so"}}, FAILED, "rank 1 (b): no .so"),
        ("Horovod", {"is_patched": False}, WARNING, "patch on rank 1 (b)"),
        ("CUDA", {}, UNTRIED, "no GPU"),
        ("CUDA", {"gpus": ["H100"], "driver": "550"}, FAILED, "driver 550 on rank 1"),
        ("code", {}, OK, "keras_dist 1f"),
        ("code", {"code": {"keras_dist": "2e"}}, FAILED, "2e on rank 1 (b)"),
    ],
)
def test_facts_that_differ_are_named(name, own, status, seen):
    """With the ranks and the host that have another value."""
    found = [FACTS, {**FACTS, "host": "b", **own}]
    state, text, cure, _ = environment.VERDICTS[name](found, ["a", "b"])
    assert state == status and seen in text, text
    assert bool(cure) == (status in (FAILED, WARNING))


def host(name, **own):
    """What a host says of itself."""
    address = f"10.0.0.{ord(name) - 96}"
    known = {"hostname": name, "named": name, "own_address": address}
    cards = {"lo": "127.0.0.1", "eth0": address, "docker0": "172.17.0.1"}
    return {**known, "interface": "eth0", "address": address, "addresses": cards, **own}


REACHED = {"host": 1, "error": "", "wrong": {}, "skew": 0.001, "doubt": 0.0}


@pytest.mark.parametrize(
    ("name", "own", "tried", "status", "seen"),
    [
        ("network", {}, {}, OK, "docker0 172.17.0.1"),
        ("network", {}, {"error": "timed out"}, FAILED, "b at 10.0.0.2: timed out"),
        ("names", {}, {}, OK, "b is 10.0.0.2"),
        ("names", {}, {"wrong": {"b": "127.0.1.1"}}, FAILED, "on a the name b is 127"),
        ("names", {"own_address": "127.0.1.1"}, {}, WARNING, "b is 127.0.1.1 on itsel"),
        ("names", {"own_address": ""}, {}, WARNING, "b is unknown on itself"),
        ("clocks", {}, {}, OK, "0.001 s"),
        ("clocks", {}, {"skew": -1.0}, WARNING, "differ by 1.000 s"),
        ("clocks", {}, {"skew": 60.0}, FAILED, "a and b differ by 60.000 s"),
    ],
)
def test_hosts_that_do_not_reach_each_other_are_named(name, own, tried, status, seen):
    """By the line that is about it: address, name or clock."""
    hosts, reached = [host("a"), host("b", **own)], [[{**REACHED, **tried}], []]
    more = [[True, True]] if name == "names" else []
    state, text, cure, _ = getattr(network, name)(hosts, reached, *more)
    assert state == status and seen in text, text
    assert bool(cure) == (status in (FAILED, WARNING))


@pytest.mark.parametrize(
    ("rate", "plain", "status"),
    [(0.4, 0.9, OK), (0.12, 0.9, OK), (0.05, 0.9, WARNING), (0.1, 0.2, WARNING)]
    + [(0.012, 0.012, FAILED)],
)
def test_a_slow_network_fails_and_busy_cores_do_not(rate, plain, status):
    """What a plain connection reaches of the card's rate is about the network."""
    nominal = (1.25e9, "eth0: 10 Gbit/s")
    state, text, cure, _ = between_hosts(rate * 1e9, "x", plain * 1e9, nominal)
    assert state == status and "10 Gbit/s" in text
    assert bool(cure) == (status != OK)


def test_a_name_of_loopback_fails_without_the_patch():
    """Then Horovod takes the address of the host's own name."""
    hosts = [host("a"), host("b", own_address="127.0.1.1")]
    state, text, _, _ = network.names(hosts, [[REACHED], []], [True, False])
    assert state == FAILED and "b is 127.0.1.1" in text


def test_lines_fit_the_width():
    """At 80 columns and at 40, what was seen and what to do begin in one column."""
    result = Result("names", "names", FAILED, "word " * 30, "do " * 40)
    for width in (40, 80):
        lines = lines_of(result, width=width)
        assert max(map(len, lines)) <= width
        assert lines[0].startswith("  ✘ names ")
        assert [line for line in lines if "→" in line]
        assert all(line.startswith(" " * 17) for line in lines[1:])


def test_a_terminal_without_unicode_gets_letters():
    """And nothing is lost but the signs."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = Screen(out, 80)
    show_result(screen, Result("a", "b", FAILED, "64×64 → 3", "do it"))
    results = [Result("a", "b", FAILED, ""), Result("a", "c", OK, "")]
    screen.line(summary_of(results))
    out.flush()
    text = out.buffer.getvalue().decode()
    assert "  x b            64x64 > 3" in text and "> do it" in text
    assert "1 holds, 1 failed" in text


class Terminal(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self):
        """It is one."""
        return True


def shown_on(out, width=40):
    """What a screen sends: what is running, and then a result."""
    with Screen(out, width) as screen:
        screen.running("  … " + "long " * 20)
        show_result(screen, Result("a", "b", OK, "[bold]right[/bold] :x:"))
    return out.getvalue()


def test_what_is_running_is_on_a_terminal_alone(monkeypatch):
    """One line, as wide as the terminal at most, which is erased; the sign is green."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    line = "b            [bold]right[/bold] :x:\n"
    for force in (None, "1"):
        if force is not None:
            monkeypatch.setenv("FORCE_COLOR", force)
        assert shown_on(io.StringIO()) == f"  ✔ {line}"
    sent = shown_on(Terminal())
    running = re.findall(r"  … [long ]*", sent)
    assert running and max(map(len, running)) < 40
    erased = sent.rindex("\x1b[2K")
    assert sent[erased:].removeprefix("\x1b[2K") == f"  \x1b[32m✔\x1b[0m {line}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown_on(Terminal())
    assert shown_on(Terminal()).endswith(f"\x1b[2K  ✔ {line}")


def test_two_checks_at_once_have_folders_of_their_own():
    """Each start names its run, and its ranks and their restarts have that name."""
    options = argparse.Namespace(script="", resume_folder="", quick=False)
    runs = [rank_words(options) for _ in range(2)]
    assert runs[0] != runs[1]
    assert all("--run-name" in words for words in runs)


def test_a_result_passes_through_the_output_of_a_rank():
    """With a prefix of the launcher; and other lines are none."""
    result = Result("a", "b", OK, "ä → ö", data={"x": [1.5]})
    assert result_in(f"[3] {result.line()}\n") == result
    assert result_in(result.line()[:-5]) is None


def test_the_reason_of_a_failed_launch_is_short():
    """The launcher's own words; else the end of what others have said."""
    assert reason_in("a\nb\nc\nd") == "b c d"
    assert len(reason_in("keras-dist: " + "x" * 5000)) < 650
    lines = ["[0] keras-dist: waited 9 s.", "keras-dist: rank 0 failed first, here."]
    lines += [
        "Rank 0: ended with exit code 1, and without a Python error",
        "Rank 1 was",
    ]
    assert reason_in("\n".join(lines)) == (
        "waited 9 s; rank 0 failed first, here: ended with exit code 1, and without a "
        "Python error"
    )


def test_gpus_are_found_by_the_listing():
    """Also those of a listing that has no numbers for some fields."""
    listing = "0, GPU-1b, A, 81559, [N/A], 550.54\n1, GPU-2c, B, 100, 7, 550.54, 4, 8\n"
    first, second = gpus.gpus_in(listing)
    assert (first.uuid, first.used, first.link) == ("GPU-1b", 0, 0.0)
    assert (second.index, second.total >> 20, second.used >> 20) == (1, 100, 7)
    assert second.link == pytest.approx(15.75e9, rel=0.01)
    assert gpus.visible([first, second], {"CUDA_VISIBLE_DEVICES": "1,5,0"}) == [second]


@pytest.mark.parametrize("bad", [["--time-limit", "0"], ["--only", "envirnment"]])
def test_wrong_options_are_an_error(bad, capsys):
    """And nothing is started."""
    assert command.main(["check", *bad]) == 1
    assert f"Received: {' '.join(bad)}" in capsys.readouterr().err
