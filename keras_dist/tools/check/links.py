"""What a plain connection between hosts reaches, beside which collectives stand."""

import contextlib
import os
import secrets
import socket
import threading
import time

from keras_dist import comm
from keras_dist.launch.hosts import addresses

# Bytes of a try, the most tries, and seconds after which there is no more.
_BYTES, _TRIES, _SECONDS = 16_000_000, 8, 5.0

_CHUNK, _TIMEOUT, _TOKEN = 1 << 20, 60.0, 16


def plain_rate() -> float:
    """Bytes per second from each host to the next one by a plain connection.

    The best of some tries counts, since other processes may have the cores meanwhile.
    All ranks call it; the first one of each host takes part.

    Returns:
        That of the slowest pair of hosts; 0 if there is one host.

    Raises:
        OSError: If a host cannot be reached.
    """
    is_first = comm.local_rank() == 0
    address = addresses().get(os.environ.get("HOROVOD_GLOO_IFACE", ""), "")
    receiver = _Receiver(address) if is_first else None
    own = (address, receiver.port, receiver.token) if receiver else None
    hosts = [(rank, host) for rank, host in enumerate(comm.gather(own)) if host]

    def measured() -> float:
        if not is_first or len(hosts) == 1:
            return 0.0
        number = [rank for rank, _ in hosts].index(comm.rank())
        return _rate(*hosts[(number + 1) % len(hosts)][1])

    rates = comm.gather_or_raise(measured)
    if receiver is not None:
        receiver.close()
    return min([rate for rate in rates if rate], default=0.0)


class _Receiver:
    """Reads what another host of this job sends, and says when it has all of it."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_bytes(_TOKEN)
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._receive, daemon=True).start()

    def close(self) -> None:
        """Read no more."""
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._socket.accept()
                with link, contextlib.suppress(OSError):
                    link.settimeout(_TIMEOUT)
                    if link.recv(_TOKEN, socket.MSG_WAITALL) == self.token:
                        self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        left, buffer = _BYTES, bytearray(_CHUNK)
        while count := link.recv_into(buffer):
            left -= count
            if not left:
                link.sendall(b"\1")
                left = _BYTES


def _rate(address: str, port: int, token: bytes) -> float:
    """Bytes per second to a receiver."""
    data = bytes(_BYTES)
    begin = time.monotonic()
    rates: list[float] = []
    with socket.create_connection((address, port), _TIMEOUT) as link:
        link.sendall(token)
        while len(rates) < _TRIES and time.monotonic() - begin < _SECONDS:
            start = time.perf_counter()
            link.sendall(data)
            if not link.recv(1):
                raise ConnectionError("the other host reads no more")
            rates.append(_BYTES / (time.perf_counter() - start))
    return max(rates)
