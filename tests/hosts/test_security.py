"""Who has not the secret of a job can do nothing at its open ports."""

import json
import socket
import sys
from pathlib import Path

import pytest
from harness.launching import RUN, wait_for_files, write_script
from harness.on_hosts import meet, outputs

SSH, CLOSED = 22, 9

# Each rank waits for the file `end`; with a second argument it connects before.
_WAITS = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
if sys.argv[2:]:
    import keras_dist
    keras_dist.gather(rank)
(folder / f"there.{rank}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
print("sum", keras_dist.sum(1) if sys.argv[2:] else "of none", flush=True)
"""

# Tries all ports that it is given: noise, HTTP without a secret, and a meeting with
# another one. A line of JSON for each port: what it has got.
_STRANGER = """
import http.client, json, os, socket, sys
sys.argv[0] = "keras-dist"  # which needs no TensorFlow
from keras_dist.clusters import Place
from keras_dist.launch.meeting import Meeting
host, ports = sys.argv[1], json.loads(sys.argv[2])

def outcome(work):
    try:
        return work()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) if isinstance(error, ValueError) else type(error).__name__

for port in ports:
    def send(length):
        with socket.create_connection((host, port), 3) as link:
            link.sendall(os.urandom(length))

    def probe():
        request = http.client.HTTPConnection(host, port, timeout=5)
        request.request("GET", "/probe")
        return request.getresponse().status

    for length in (0, 1, 300, 5000):
        outcome(lambda: send(length))
    place = Place("keras-dist run", 1, 2, address=host, port=port)
    meeting = Meeting(place, "not its secret", kind="host", name="c", timeout=0)
    print(json.dumps([port, [outcome(probe), outcome(meeting.__enter__)]]))
"""


def listening(net, name):
    """The ports of TCP on which processes of a host listen, and the addresses."""
    found = {}
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{net.first(name)}/net/{table}").read_text().splitlines()
        for line in lines[1:]:
            _, local, _, state = line.split()[:4]
            address, _, port = local.rpartition(":")
            if state == "0A" and int(port, 16) != SSH:
                own = socket.inet_ntoa(bytes.fromhex(address[:8])[::-1])
                found[int(port, 16)] = own if table == "tcp" else address
    return found


def tried(net, stranger, host, ports):
    """What a stranger gets at ports of a host: a status of HTTP, and an error."""
    words = [sys.executable, "-c", _STRANGER, net.address(host), json.dumps(ports)]
    done = net.run(stranger, words, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.fixture
def script(folder):
    """A script whose ranks wait, in a folder that all hosts see."""
    return Path(write_script(folder, _WAITS))


def test_a_stranger_is_refused_by_every_open_port_of_a_job(net, script):
    """From a third host: those that its processes have in truth; the job goes on."""
    jobs = meet(net, "ab", script, script.parent)
    wait_for_files(*(script.with_name(f"there.{rank}") for rank in (0, 1)))
    ports = {name: listening(net, name) for name in "ab"}
    # One can be reached: the store.
    assert sum(map(len, ports.values())) == 1, ports
    for name in "ab":
        found = tried(net, "c", name, [*ports[name], CLOSED])
        assert found.pop(CLOSED)[0] == "ConnectionRefusedError"
        for status, error in found.values():
            assert status == 403 and "refuses this one" in error
    script.with_name("end").touch()
    assert outputs(jobs)[0].count("sum of none") == 2


def test_nothing_but_the_store_listens_when_the_ranks_have_connected(net, script):
    """Gloo's ports are open before alone; the job goes on."""
    job = net.start("a", [*RUN, "-H", "a:1,b:1", script, script.parent, "connects"])
    wait_for_files(*(script.with_name(f"there.{rank}") for rank in (0, 1)))
    (store,) = listening(net, "a")
    assert listening(net, "b") == {}
    assert tried(net, "c", "a", [store])[store][0] == 403
    script.with_name("end").touch()
    assert outputs([job])[0].count("sum 2") == 2
