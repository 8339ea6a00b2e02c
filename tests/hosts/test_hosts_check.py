"""`keras-dist check` on two hosts: a planted fault fails the line that is about it."""

import json
import sys

import pytest
from network import ROOT

CHECK = [sys.executable, "-m", "keras_dist", "check"]
ENV = [sys.executable, "-m", "keras_dist", "env"]
ON_BOTH = ["-H", "a:1,b:1"]

# Each host has a /tmp of its own.
_OTHER_TENSORFLOW = """
mkdir -p /tmp/planted/tensorflow-2.20.0.dist-info
printf 'Metadata-Version: 2.1\\nName: tensorflow\\nVersion: 2.20.0\\n' \\
    > /tmp/planted/tensorflow-2.20.0.dist-info/METADATA
"""
_FULL_DISK = """
mkdir -p /tmp/full && mount -t tmpfs -o size=1m tmpfs /tmp/full
"""
_SLOW_LINK = """
tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 400ms
"""


def checked(net, shared, words, *, env=None, timeout=900):
    """Results by group and name, and what was printed."""
    path = shared / "found.json"
    path.unlink(missing_ok=True)
    words = [*words, *ON_BOTH, "--json", path]
    done = net.run("a", words, timeout=timeout, env=env)
    assert path.exists(), done.stdout + done.stderr
    found = json.loads(path.read_text())
    results = {(r["group"], r["name"]): r for r in found["results"]}
    assert found["holds"] == (done.returncode == 0)
    return results, done


def failed(results):
    """The checks that have failed."""
    return {key for key, result in results.items() if result["status"] == "failed"}


def on_host(net, name, script):
    """Run a script of the shell on a host."""
    done = net.run(name, ["bash", "-ec", script])
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_everything_holds_on_two_hosts(net, shared):
    """In a folder that both see; each reaches the other one by address and name."""
    folder = shared / "resume"
    folder.mkdir()
    for name in "ab":
        net.add_bridge(name, "docker0", "172.17.0.1/16")
    words = [*CHECK, "--quick", "--resume-folder", folder]
    results, done = checked(net, shared, words)
    assert not failed(results), done.stdout
    assert results["resume", "shared"]["seen"] == (
        "all 2 hosts see the files of the others"
    )
    assert "a is 10.77.0.1, b is 10.77.0.2" in results["environment", "names"]["seen"]
    assert "docker0 172.17.0.1" in results["environment", "network"]["seen"]
    assert "10 Gbit/s" in results["collectives", "bandwidth"]["seen"]
    assert results["resume", "resume"]["status"] == "ok"


@pytest.mark.long
def test_another_tensorflow_and_a_name_of_loopback_fail_their_lines(net, shared):
    """Version of b's TensorFlow; and b finds a at 127.0.1.1, which is b itself."""
    on_host(net, "b", _OTHER_TENSORFLOW)
    net.write_hosts("b", f"127.0.0.1 localhost\n{net.address('b')} b\n127.0.1.1 a")
    env = {"PYTHONPATH": f"/tmp/planted:{ROOT}"}
    results, done = checked(net, shared, ENV, env=env)
    on_host(net, "b", "rm -r /tmp/planted")
    names = ("versions", "names")
    assert failed(results) == {("environment", name) for name in names}, done.stdout
    assert "2.20.0 on rank 1 (b)" in results["environment", "versions"]["seen"]
    assert "on b the name a is 127.0.1.1" in results["environment", "names"]["seen"]


@pytest.mark.long
def test_a_slow_link_and_a_full_disk_fail_their_lines(net, shared):
    """All numbers are right over a link of 100 Mbit/s; nothing can be saved on b."""
    on_host(net, "b", _FULL_DISK)
    on_host(net, "b", _SLOW_LINK)
    words = [*CHECK, "--quick", "--only", "collectives,resume"]
    try:
        results, done = checked(net, shared, [*words, "--resume-folder", "/tmp/full"])
    finally:
        on_host(net, "b", "tc qdisc del dev eth0 root; umount /tmp/full")
    expected = {("collectives", "bandwidth"), ("resume", "folder")}
    assert failed(results) == expected, done.stdout
    assert "No space left on device" in results["resume", "folder"]["seen"]
    assert results["resume", "resume"]["status"] == "untried"


@pytest.mark.long
def test_a_firewall_fails_the_line_of_the_network(net, shared):
    """Only ssh may come in at a: no rank is started, and nothing waits for one."""
    let_in = [f"ipproto tcp {port} 22 lookup local" for port in ("dport", "sport")]
    net.drop_rules("a", *let_in, "ipproto tcp blackhole")
    results, done = checked(net, shared, ENV)
    assert failed(results) == {("environment", "network")}, done.stdout
    assert "b cannot reach 10.77.0.1" in results["environment", "network"]["seen"]
