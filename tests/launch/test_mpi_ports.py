"""The ports of a child are closed to others, without its help."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from keras_dist.launch import mpi_ports

# It listens at all addresses and on the loopback interface, as `mpirun` does, and
# answers whoever connects.
SERVER = """
import socket, threading
def serve(server):
    while True:
        link = server.accept()[0]
        link.sendall(link.recv(9))
        links.append(link)
links = []
for address in ("0.0.0.0", "127.0.0.1"):
    server = socket.create_server((address, 0))
    threading.Thread(target=serve, args=(server,)).start()
    print(server.getsockname()[1], flush=True)
"""


@pytest.fixture
def child():
    """A child process, and its two ports: that on the network, and the other one."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    yield process.pid, int(process.stdout.readline()), int(process.stdout.readline())
    process.kill()
    process.wait()


@pytest.fixture
def allowed(child):
    """Left out where the system does not let a process have a child's sockets."""
    with contextlib.suppress(OSError):
        mpi_ports.num_connected(child[0])
        return
    pytest.skip("left out: pidfd_getfd is not allowed here")


def connected(port):
    """A connection to a port that is answered; `None` if there is none in a second."""
    try:
        link = socket.create_connection(("127.0.0.1", port), timeout=1)
    except TimeoutError:
        return None
    link.sendall(b"a")
    assert link.recv(9) == b"a"
    return link


@pytest.mark.usefixtures("allowed")
def test_strangers_reach_no_port_once_the_ranks_are_connected(child):
    """The port on the network at once, the other after the last rank."""
    pid, on_network, on_loopback = child
    with connected(on_network), mpi_ports.closed(pid, 2):
        assert connected(on_network) is None
        with connected(on_loopback) as first:
            begin = time.monotonic()
            while (link := connected(on_loopback)) and time.monotonic() - begin < 30:
                link.close()
            assert link is None
            first.settimeout(30)
            first.sendall(b"b")  # read, and not answered: what is open stays so
            assert mpi_ports.num_connected(pid) >= 2


def test_a_server_that_has_ended_is_no_error():
    """The launcher finds out by itself."""
    process = subprocess.Popen(["true"])
    process.wait()
    with mpi_ports.closed(process.pid, 2):
        pass
    assert not os.path.exists(f"/proc/{process.pid}")
