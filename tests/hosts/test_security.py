"""Who has not the secret of a job can do nothing at its open ports."""

import json
import socket
import sys
from pathlib import Path

import pytest
from network import LAUNCH, until
from test_rdzv import SECRET

from keras_dist.launch.hosts import LOOPBACK

SSH, CLOSED = 22, 9

# Each rank connects, and waits for the file `end`.
_CONNECTS = """
import sys, time
from pathlib import Path
import keras_dist
folder = Path(sys.argv[1])
rank = keras_dist.rank()
keras_dist.gather(rank)
(folder / f"there.{rank}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
print("sum", keras_dist.sum(1), flush=True)
"""

# Tries all ports that it is given: noise, HTTP without a secret, and HTTP with another
# one's token; each plain and by TLS. A line of JSON for each port: what it has got.
_STRANGER = """
import http.client, json, os, socket, ssl, sys
sys.argv[0] = "keras-dist"  # which needs no TensorFlow
from keras_dist.launch.store import StoreClient, token_of
from keras_dist.launch.tls import with_tls
host, ports = sys.argv[1], json.loads(sys.argv[2])
wrong = "not the secret of this job"
paths = [f"{first}/{rest}" for first in ("", "0" * 32, token_of(wrong))
         for rest in ("keras_dist_watch/0", "keras_dist_watch/*", "global/0", "probe",
                      "certificate", "credential")] + ["../etc/passwd", ""]

def connected(port, has_tls):
    link = socket.create_connection((host, port), 3)
    return with_tls(link) if has_tls else link

def status_of(port, has_tls, method, path):
    request = http.client.HTTPConnection(host, port)
    request.sock = connected(port, has_tls)
    request.sock.settimeout(5)
    try:
        body = b'{"beat": 1}' if method == "PUT" else None
        request.request(method, f"/{path}", body)
        status = request.getresponse().status
        return f"{status} {path}" if status < 400 else status
    finally:
        request.close()

def outcome(work, *args):
    try:
        return work(*args)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__

for port in ports:
    found = {"plain": set(), "tls": set(), "secret": set()}
    for name in ("plain", "tls"):
        found[name].add(outcome(status_of, port, name == "tls", "GET", "probe"))
        speaks = any(isinstance(status, int) for status in found[name])
        for length in (0, 1, 300, 5000) if speaks or name == "plain" else ():
            try:
                with connected(port, name == "tls") as link:
                    link.sendall(os.urandom(length))
            except OSError:
                pass
        for method in ("GET", "PUT", "DELETE", "HEAD") if speaks else ():
            for path in paths:
                found[name].add(outcome(status_of, port, name == "tls", method, path))
    for has_tls in (False, True):
        guest = StoreClient(host, port, wrong, has_tls=has_tls)
        found["secret"].add(outcome(guest.probe))
    print(json.dumps([port, {k: sorted(map(str, v)) for k, v in found.items()}]))
"""

_OPTIONS = {
    "ssh": [],
    "ssh+tls": ["--tls"],
    "meet": ["--nnodes", 2, "--rdzv", "{first}:29400"],
    "meet+tls": ["--tls", "--nnodes", 2, "--rdzv", "{first}:29400"],
}


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


def started(net, way, hosts, *words):
    """A job on two hosts."""
    first, second = hosts
    options = [str(word).format(first=first) for word in _OPTIONS[way]]
    if way.startswith("meet"):
        command = [*LAUNCH, *options, *words]
        return [net.start(host, command, env=SECRET) for host in hosts]
    return [
        net.start(first, [*LAUNCH, *options, "-H", f"{first}:1,{second}:1", *words])
    ]


def tried(net, stranger, host, ports):
    """What a stranger gets at ports of a host."""
    words = [sys.executable, "-c", _STRANGER, net.address(host), json.dumps(ports)]
    done = net.run(stranger, words, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


# Each rank waits for the file `end`.
_WAITS = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
(folder / f"there.{rank}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
print("over", flush=True)
"""


@pytest.mark.parametrize("way", _OPTIONS)
def test_a_stranger_is_refused_by_every_open_port_of_a_job(net, shared, way):
    """From a third host: those that its processes have in truth; the job goes on."""
    folder = shared / f"open.{way}"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_WAITS)
    jobs = started(net, way, "ab", script, folder)
    there = [folder / f"there.{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() for file in there), "the ranks", 60)
    ports = {name: listening(net, name) for name in "ab"}
    has_tls = way.endswith("tls")
    # One can be reached: the store, or with TLS its entrance. The store itself, and the
    # end of the relay on each host, are at 127.0.0.1 then.
    near = {n: [p for p, own in ports[n].items() if own == LOOPBACK] for n in "ab"}
    assert [bool(near[name]) for name in "ab"] == [has_tls, has_tls], ports
    assert sum(map(len, ports.values())) == 1 + sum(map(len, near.values())), ports
    for name in "ab":
        found = tried(net, "c", name, [*ports[name], CLOSED])
        for port, answers in found.items():
            if port == CLOSED or port in near[name]:
                expected = dict.fromkeys(answers, ["ConnectionRefusedError"])
                assert answers == expected, (port, answers)
                continue
            right, other = ("tls", "plain") if has_tls else ("plain", "tls")
            # By its certificate the first host proves that it knows the secret.
            public = {"200 /certificate"} if way == "meet+tls" else set()
            assert {s for s in answers[right] if s[0].isdecimal()} == {"403"} | public
            assert not [s for s in answers[other] if s[0].isdecimal()], answers
            assert all(s.endswith("Error") for s in answers["secret"]), answers
            assert "PermissionError" in answers["secret"] or way == "ssh+tls", answers
    (folder / "end").touch()
    outputs = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), outputs
    assert "".join(stdout for stdout, _ in outputs).count("over") == 2


def test_nothing_but_the_store_listens_when_the_ranks_have_connected(net, shared):
    """Gloo's ports are open before alone; the job goes on."""
    folder = shared / "connected"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_CONNECTS)
    (job,) = started(net, "ssh", "ab", script, folder)
    there = [folder / f"there.{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() for file in there), "the ranks", 60)
    (store,) = listening(net, "a")
    assert listening(net, "b") == {}
    assert "403" in tried(net, "c", "a", [store])[store]["plain"]
    (folder / "end").touch()
    stdout, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    assert stdout.count("sum 2") == 2


# Prints how many bytes have crossed a host's network, and whether requests were read.
_SNIFF = """
import socket, sys
from pathlib import Path
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
link.bind(("eth0", 0))
link.settimeout(0.2)
seen = b""
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    try:
        seen += link.recv(1 << 16)
    except TimeoutError:
        pass
print(len(seen), b"keras_dist_watch" in seen, b" HTTP/1." in seen)
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["plain", "ssh", "meet"])
def test_with_tls_no_request_can_be_read_on_the_network(net, shared, way):
    """Nor can the token, by ssh and without it; without `--tls` both can."""
    folder = shared / f"tls.{way}"
    folder.mkdir()
    script, begin, end = folder / "script.py", folder / "begin", folder / "over"
    script.write_text(_CONNECTS)
    sniffer = net.start("b", [sys.executable, "-c", _SNIFF, begin, end])
    until(begin.exists, "the sniffer")
    options = [] if way == "plain" else ["--tls"]
    if way == "meet":
        meet = [*options, "--nnodes", 2, "--rdzv", "a:29400", script, folder]
        jobs = [net.start(host, [*LAUNCH, *meet], env=SECRET) for host in "ab"]
    else:
        words = [*LAUNCH, *options, "-H", "a:1,b:1", script, folder]
        jobs = [net.start("a", words)]
    there = [folder / f"there.{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() for file in there), "the ranks", 90)
    (folder / "end").touch()
    outputs = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), outputs
    assert "".join(stdout for stdout, _ in outputs).count("sum 2") == 2
    end.touch()
    size, *is_seen = sniffer.communicate(timeout=10)[0].split()
    assert int(size) > 10_000
    assert is_seen == [str(way == "plain")] * 2
