"""Carry connections of plain HTTP between the hosts of a job by TLS."""

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import threading
import time

from keras_dist.launch.hosts import LOOPBACK

# Seconds for a connection and its handshake, and for silence on it.
_CONNECT_SECONDS, _IDLE_SECONDS = 5.0, 60.0

_RETRY_SECONDS = 0.1

_BACKLOG, _BYTES = 1024, 1 << 16


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
    """What a certificate is known by: its SHA-256, in hexadecimal."""
    return hashlib.sha256(certificate or b"").hexdigest()
