"""`keras-dist check` on two hosts: a planted fault fails the line that is about it."""

import json
import sys

import pytest
from harness.launching import ROOT

CHECK = [sys.executable, "-m", "keras_dist", "check"]

# Each host has a /tmp of its own.
_OTHER_TENSORFLOW = """
mkdir -p /tmp/planted/tensorflow-2.20.0.dist-info
printf 'Metadata-Version: 2.1\\nName: tensorflow\\nVersion: 2.20.0\\n' \\
    > /tmp/planted/tensorflow-2.20.0.dist-info/METADATA
"""


def run_check(net, shared, **env):
    """Results by name, and what was printed."""
    path = shared / "results.json"
    path.unlink(missing_ok=True)
    words = [*CHECK, "-H", "a:1,b:1", "--json", path]
    done = net.run("a", words, timeout=600, **env)
    assert path.exists(), done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["passed"] == (done.returncode == 0)
    return {each["name"]: each for each in content["results"]}, done


def failed(results):
    """The checks that have failed."""
    return [name for name, each in results.items() if each["status"] == "failed"]


def on_host(net, name, script):
    """Run a script of the shell on a host."""
    done = net.run(name, ["bash", "-ec", script])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_everything_passes_on_two_hosts(net, shared):
    """Each host is named with the address that its rank uses."""
    for name in "ab":
        net.add_bridge(name, "docker0", "172.17.0.1/16")
    results, done = run_check(net, shared)
    assert not failed(results), done.stdout
    seen = results["connect"]["seen"]
    assert "eth0 10.77.0.1 on rank 0 (a), eth0 10.77.0.2 on rank 1 (b)" in seen


@pytest.mark.long
def test_another_tensorflow_on_one_host_fails_its_line(net, shared):
    """With the version and the host."""
    on_host(net, "b", _OTHER_TENSORFLOW)
    results, done = run_check(net, shared, PYTHONPATH=f"/tmp/planted:{ROOT}")
    on_host(net, "b", "rm -r /tmp/planted")
    assert failed(results) == ["alike"], done.stdout
    assert "TensorFlow 2.20.0" in results["alike"]["seen"]
    assert "on rank 1 (b)" in results["alike"]["seen"]
