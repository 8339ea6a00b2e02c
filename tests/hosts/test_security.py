"""Who has not the secret of a job can do nothing at its open ports."""

import sys
from pathlib import Path

import pytest
from network import LAUNCH, until
from test_rdzv import SECRET

SSH = 22

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

# Prints what it gets for requests of all kinds, and whether it can connect at all.
_STRANGER = """
import http.client, json, socket, sys
host, ports = sys.argv[1], json.loads(sys.argv[2])
guess = "0" * 32
for port in ports:
    try:
        socket.create_connection((host, port), 3).close()
    except OSError:
        print(port, "closed")
        continue
    found = set()
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        for path in ("", "keras_dist_watch/0", f"{guess}:{port}/keras_dist_watch/0",
                     f"{guess}/global/0", "keras_dist_watch/*", "../etc/passwd"):
            link = http.client.HTTPConnection(host, port, timeout=3)
            body = b'{"beat": 1}' if method == "PUT" else None
            try:
                link.request(method, f"/{path}", body)
                found.add(link.getresponse().status)
            except ConnectionError:  # refused before the body was read
                pass
            link.close()
    print(port, sorted(found))
"""


def listening(net, name):
    """The ports of TCP on which processes of a host listen."""
    ports = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{net.first(name)}/net/{table}").read_text().splitlines()
        for line in lines[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def test_a_stranger_is_refused_by_every_open_port_of_a_job(net, shared):
    """From a third host, while the ranks of two are connected; the job goes on."""
    folder = shared / "open"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_CONNECTS)
    job = net.start("a", [*LAUNCH, "-H", "a:1,b:1", script, folder])
    there = [folder / f"there.{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() for file in there), "the ranks", 60)
    ports = {name: sorted(listening(net, name) - {SSH}) for name in "ab"}
    (store,) = ports["a"]  # nothing else listens when the ranks have connected
    assert ports["b"] == []
    words = [sys.executable, "-c", _STRANGER, net.address("a"), f"[{store}, 9]"]
    done = net.run("c", words)
    assert done.stdout.splitlines() == [f"{store} [403]", "9 closed"], done.stderr
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
