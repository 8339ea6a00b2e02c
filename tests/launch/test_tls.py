"""`--tls`: what crosses the network to the job's store and back is encrypted."""

import contextlib
import random
import socket
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_fuzz import mutated, request
from test_launch import start as run
from test_meeting import SECRET, ended, free_port, meet

from keras_dist.launch import systems
from keras_dist.launch.hosts import slots
from keras_dist.launch.store import (
    OwnStoreClient,
    Store,
    StoreClient,
    client_of,
    token_of,
    variables_of,
)
from keras_dist.launch.tls import Exit, digest_at, make_certificate, with_tls

OWN = SECRET["KERAS_DIST_SECRET"]


@pytest.fixture
def store():
    """A store of a job on hosts that meet."""
    found = Store("127.0.0.1", has_tls=True, proof_secret=OWN)
    OwnStoreClient(found, OWN)
    yield found
    found.close()


class Wire(threading.Thread):
    """Carries one connection after the other to a port, and reads along."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target, self.seen = self.listener.getsockname()[1], port, b""

    def run(self):
        """Until the listener is closed."""
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source, target):
        """One direction."""
        while data := source.recv(1 << 16):
            self.seen += data
            target.sendall(data)
        with contextlib.suppress(OSError):  # both directions have ended
            target.shutdown(socket.SHUT_WR)


def test_a_host_writes_and_reads_values_that_nobody_reads_on_the_way(store):
    """Neither the values nor the token, which is in all requests."""
    wire = Wire(store.port)
    wire.start()
    values = {f"v{number}": "a long text " * 50_000 for number in range(8)}
    host = StoreClient("127.0.0.1", wire.port, OWN, has_tls=True)
    assert host.probe() == ("127.0.0.1", "127.0.0.1")
    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(host.put, values, values.values()))
        assert list(executor.map(host.get, values)) == list(values.values())
    assert host.get("none") is None
    assert len(wire.seen) > 16 * 600_000
    for text in (token_of(OWN).encode(), b"a long text", b"HTTP/1"):
        assert text not in wire.seen
    address, port = host.for_ranks("10.0.0.1")
    assert address == "127.0.0.1" and port != store.port
    wire.listener.close()


def test_who_does_not_know_the_secret_is_neither_asked_nor_answered(store):
    """Another secret; another store in the place of this one; and no TLS at all."""
    with pytest.raises(PermissionError, match="with this secret"):
        StoreClient("127.0.0.1", store.port, "a guess", has_tls=True).probe()
    other, plain = Store("127.0.0.1", has_tls=True), Store()
    with pytest.raises(ConnectionError, match="no store answers there"):
        StoreClient("127.0.0.1", other.port, OWN, has_tls=True).probe()
    with pytest.raises(OSError, match="`--tls` is missing on one host"):
        StoreClient("127.0.0.1", plain.port, OWN, has_tls=True).probe()
    with pytest.raises(ConnectionError, match="`--tls` is missing on one"):
        StoreClient("127.0.0.1", store.port, OWN).probe()
    link = Exit("127.0.0.1", other.port, store.digest)
    link.start()
    with socket.create_connection(("127.0.0.1", link.port)) as near:
        near.sendall(b"GET /secret HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert near.recv(100) == b""
    with with_tls(socket.create_connection(("127.0.0.1", store.port))) as tls:
        assert tls.version() == "TLSv1.3"
        tls.sendall(b"GET /%s/keras_dist_watch/beat.0 HTTP/1.0\r\n\r\n" % (b"0" * 32))
        assert b" 403 " in tls.recv(1000)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    near = socket.create_connection(("127.0.0.1", store.port))
    with near, pytest.raises(ssl.SSLError):
        old.wrap_socket(near)
    other.close()
    plain.close()


def test_noise_does_not_end_the_entrance(store):
    """Connections that are closed, silent, or bring no handshake."""
    links = []
    for number in range(200):
        link = socket.create_connection(("127.0.0.1", store.port))
        if number % 3:
            link.sendall(bytes([22, 3, number % 5, 0, 200]) * (number % 4))
        if number % 2:
            link.close()
        links.append(link)
    link = socket.create_connection(("127.0.0.1", store.port))
    assert digest_at(link, OWN) == store.digest
    for link in links:
        link.close()


def test_random_messages_by_tls_change_nothing(store):
    """Of one who has not the secret: whole requests with changes, and noise."""
    generator = random.Random(22)
    host = StoreClient("127.0.0.1", store.port, OWN, has_tls=True)
    host.probe()
    assert host.put("beat.0", 1)
    tokens, found = ["", "0" * 32, token_of("another"), OWN], Counter()
    before = {name: dict(scope) for name, scope in store._server.cache.items()}
    for number in range(300):
        method = generator.choice(["GET", "PUT", "DELETE", "HEAD", "POST"])
        path = f"/{generator.choice(tokens)}/keras_dist_watch/beat.0"
        whole = request(method, path, b"2")
        message = whole if number % 4 == 1 else mutated(generator, whole)
        if number % 10 == 0:
            message = generator.randbytes(generator.randint(0, 300))
        near = socket.create_connection(("127.0.0.1", store.port))
        if number % 4 == 0:  # not even a handshake
            with near:
                near.sendall(message)
            continue
        with contextlib.suppress(OSError, IndexError), with_tls(near) as link:
            link.settimeout(10 if message == whole else 0.02)
            link.sendall(message)
            found[link.recv(100).partition(b"\r\n")[0].split(b" ", 2)[1]] += 1
    assert found[b"403"] > 50 and not [code for code in found if code < b"400"], found
    assert {name: dict(scope) for name, scope in store._server.cache.items()} == before
    assert host.get("beat.0") == 1 and host.put("beat.0", 2)


def test_an_agent_reaches_the_store_by_the_certificate_that_ssh_has_brought():
    """Its ranks find it at 127.0.0.1; nobody else gets a proof of it."""
    store = Store("127.0.0.1", has_tls=True)
    store.open(slots([("a", 1), ("b", 1)]), "secret")
    own = store.variables("secret")
    assert client_of(own).put("beat.0", 1)
    OwnStoreClient(store, "of the job")
    agent = StoreClient(
        "127.0.0.1", store.port, "of the job", has_tls=True, digest=store.digest
    )
    assert agent.probe() == ("127.0.0.1", "127.0.0.1")
    address, port = agent.for_ranks("10.0.0.1")
    assert address == "127.0.0.1"
    ports = str(store.port), own["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    assert str(port) not in ports
    assert client_of(variables_of(address, port, "secret")).get("beat.0") == 1
    with pytest.raises(ConnectionError):
        digest_at(socket.create_connection(("127.0.0.1", store.port)), "")
    store.close()


_SCRIPT = """
import os, time
from keras_dist.launch.store import client_of
store, rank = client_of(), int(os.environ["HOROVOD_RANK"])
assert os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].startswith("127.0.0.1:")
assert store.put(f"there.{rank}", rank)
while store.get(f"there.{1 - rank}") is None:
    time.sleep(0.05)
print("both", os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], flush=True)
"""


def test_hosts_that_meet_by_tls_run_their_ranks(tmp_path):
    """Two commands on one machine, each with a port of its own for its ranks."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    found = ended(meet("-np", 1, script, options=["--tls"]))
    assert [code for code, _, _ in found] == [0, 0], found
    ports = {stdout.split()[-1] for _, stdout, _ in found}
    assert len(ports) == 2 and all(" both " in stdout for _, stdout, _ in found)


def test_what_tls_needs_is_named(tmp_path):
    """The command `openssl`, and no host that speaks without it."""
    words = ["--nnodes", 1, "--rdzv", f"127.0.0.1:{free_port()}", "--tls", "-m", "this"]
    done = run(*words, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "`--tls` needs the command `openssl`" in done.stderr


def test_a_missing_openssl_is_a_package_of_the_system(tmp_path, monkeypatch):
    """Where it is conda's, `apt-get` would not put it on the PATH."""
    conda = systems.system_of({"CONDA_PREFIX": "/opt/conda"}, "ID=debian")
    monkeypatch.setattr(systems, "this_system", lambda: conda)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="Run: conda install -c conda-forge openssl$"):
        make_certificate()
