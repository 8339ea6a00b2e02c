"""TLS between the hosts of a job, around connections that speak plain HTTP.

Horovod's client in each rank knows no TLS. So the store listens at 127.0.0.1, and
relays carry connections between the hosts: an `Exit` in the agent of each host takes
them at 127.0.0.1, and the `Entrance` on the store's host hands them to the store.

A certificate is made for each job, and no authority signs it: a host knows it because
ssh has brought its digest, or because the first host proves that who has made it knows
the job's secret.
"""

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.signing import derived
from keras_dist.launch.systems import here

# What the first host answers to who asks for it: the proof of its certificate.
PATH = "certificate"

# Seconds for a connection and its handshake, and for silence on it.
_CONNECT_SECONDS, _IDLE_SECONDS = 5.0, 60.0

_RETRY_SECONDS = 0.1

_BACKLOG, _BYTES = 1024, 1 << 16

_OPENSSL = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "3650"),
    *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=keras_dist"),
    *("-keyout", "key", "-out", "certificate"),
)


@dataclass(frozen=True)
class Certificate:
    """The certificate of a job, on the host that has its key.

    Args:
        digest: SHA-256 of it, in hexadecimal.
        context: Settings of connections that show it.
    """

    digest: str
    context: ssl.SSLContext


def make_certificate() -> Certificate:
    """Make a certificate; its key is in the memory of this process alone.

    Raises:
        ValueError: If there is no `openssl`, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="keras_dist.") as folder:  # mode 0700
        try:
            subprocess.run(_OPENSSL, cwd=folder, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                "`--tls` needs the command `openssl` on the host with the job's store. "
                f"Received: {error}. Run: {here('apt-get install openssl')}"
            ) from error
        context = context_of(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        path = Path(folder)
        context.load_cert_chain(path / "certificate", path / "key")
        text = (path / "certificate").read_text()
    return Certificate(digest_of(ssl.PEM_cert_to_DER_cert(text)), context)


def proof_of(digest: str, secret: str) -> bytes:
    """Return what the first host answers at `PATH` if this is its certificate."""
    return derived(secret, f"certificate {digest}").encode()


def digest_at(link: socket.socket, secret: str) -> str:
    """Digest of the certificate at the other end, if who shows it knows the secret.

    Args:
        link: A connection to the first host, which is used up.
        secret: Secret of the job.

    Raises:
        OSError: If there is no TLS.
        PermissionError: If the first host has another secret, or somebody else answers.
    """
    with with_tls(link) as tls:
        digest = digest_of(tls.getpeercert(binary_form=True))
        tls.sendall(f"GET /{PATH} HTTP/1.0\r\n\r\n".encode())
        answer = b""
        while (data := tls.recv(_BYTES)) and len(answer) < _BYTES:
            answer += data
    head, _, proof = answer.partition(b"\r\n\r\n")
    if b" 200" not in head.partition(b"\r\n")[0]:
        raise ConnectionError("no store answers there")
    if not hmac.compare_digest(proof, proof_of(digest, secret)):
        raise PermissionError("the certificate is not that of a host with this secret")
    return digest


class _Relay:
    """Takes connections, and carries what comes over each to another one.

    Args:
        address: Address at which it listens.
        port: Port; 0 for one that the system chooses.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, address: str, port: int) -> None:
        self._listener = socket.create_server((address, port), backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        """Begin to take connections."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        # A thread that waits in `accept` would keep the port.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)  # too many files are open
                continue
            threading.Thread(target=self._serve, args=[link], daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        # A connection that fails is one that its other end sees closed.
        with contextlib.suppress(OSError, ValueError), link:
            link.settimeout(_CONNECT_SECONDS)
            tls, plain = self._pair(link)
            with tls, plain:
                _carry(tls, plain)

    def _pair(self, link: socket.socket) -> tuple[ssl.SSLSocket, socket.socket]:
        """For a connection that has come: the one with TLS, and the plain one."""
        raise NotImplementedError


class Entrance(_Relay):
    """On the store's host: TLS on the outside, the store at 127.0.0.1 inside.

    Args:
        address: Address at which it listens.
        port: Port; 0 for one that the system chooses.
    """

    def open(self, context: ssl.SSLContext, store: int) -> None:
        """Begin to take connections.

        Args:
            context: Settings of TLS, with the certificate that it shows.
            store: Port of the store.
        """
        self._context, self._store = context, store
        self.start()

    def _pair(self, link: socket.socket) -> tuple[ssl.SSLSocket, socket.socket]:
        tls = self._context.wrap_socket(link, server_side=True)
        return tls, _connected(LOOPBACK, self._store)


class Exit(_Relay):
    """On another host: takes connections at 127.0.0.1, and carries them to the store.

    Args:
        address: Address of the store's host.
        port: Port of its `Entrance`.
        digest: Digest of the certificate that it has to show.
    """

    def __init__(self, address: str, port: int, digest: str) -> None:
        super().__init__(LOOPBACK, 0)
        self._far, self._digest = (address, port), digest

    def _pair(self, link: socket.socket) -> tuple[ssl.SSLSocket, socket.socket]:
        tls = with_tls(_connected(*self._far))
        if not hmac.compare_digest(
            digest_of(tls.getpeercert(binary_form=True)), self._digest
        ):
            tls.close()
            raise PermissionError("another certificate")
        return tls, link


def _carry(tls: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry what comes from each end to the other one, until one is closed."""
    poll = select.poll()
    for link in (tls, plain):
        link.settimeout(_IDLE_SECONDS)
        poll.register(link, select.POLLIN)
    while True:
        ready = {number for number, _ in poll.poll(_IDLE_SECONDS * 1000)}
        if not ready:
            return
        if plain.fileno() in ready:
            data = plain.recv(_BYTES)
            if not data:
                return
            tls.sendall(data)
        if tls.fileno() in ready and not _carry_from(tls, plain):
            return


def _carry_from(tls: ssl.SSLSocket, plain: socket.socket) -> bool:
    """Carry what has come by TLS; whether the other end has not closed it."""
    # What has come may be a part of a record, or a message of TLS itself.
    tls.settimeout(0)
    try:
        while data := tls.recv(_BYTES):
            plain.sendall(data)
    except ssl.SSLWantReadError:
        return True
    finally:
        tls.settimeout(_IDLE_SECONDS)
    return False


def _connected(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), _CONNECT_SECONDS)


def with_tls(link: socket.socket) -> ssl.SSLSocket:
    """This end of a connection with TLS; the other one has to be checked yet.

    Args:
        link: The connection, which is used up.

    Raises:
        OSError: If there is no TLS.
    """
    context = context_of(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return context.wrap_socket(link)
    except (OSError, ValueError):
        link.close()
        raise


def context_of(protocol: int) -> ssl.SSLContext:
    """Settings of TLS for one end of a connection."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def digest_of(certificate: bytes | None) -> str:
    """Return what a certificate is known by: its SHA-256, in hexadecimal."""
    return hashlib.sha256(certificate or b"").hexdigest()
