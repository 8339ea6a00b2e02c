"""Who has not the secret of a job can do nothing at its open ports."""

import sys
from pathlib import Path

from network import LAUNCH, until

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
