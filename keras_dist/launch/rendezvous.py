"""The rendezvous: Horovod's key-value store, protected by a secret of the job."""

import contextlib
import hmac
import importlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist.launch.hosts import LOOPBACK, Slot, interface_of

_FORBIDDEN = 403

# Connections that the kernel accepts before the server does. Ranks connect all at once,
# and one that finds no room tries again only after 1, 3 and 7 s.
_BACKLOG = 1024


@contextlib.contextmanager
def rendezvous(
    slots: Sequence[Slot], secret: str, address: str = LOOPBACK
) -> Iterator[dict[str, str]]:
    """Inside the block, an HTTP server runs in which the ranks find each other.

    It listens on one address, and only answers requests whose path begins with the
    secret. The secret is in the path because Horovod's client sends no headers; but it
    accepts an address with a path behind the port.

    Args:
        slots: The slots of all ranks.
        secret: Secret of this job.
        address: Address of this host, by which the ranks reach the server.

    Yields:
        Environment variables for Horovod in each rank.

    Raises:
        RuntimeError: If Horovod is not installed.
    """
    try:
        http_server = importlib.import_module("horovod.runner.http.http_server")
    except ImportError as error:
        raise RuntimeError(
            f"Horovod is not installed here. Received: {error}. "
            "Run `keras-dist install-horovod`."
        ) from error
    handler = _guarded(http_server.RendezvousHandler, secret)
    server = http_server.RendezvousHTTPServer((address, 0), handler, 0)
    server.daemon_threads = True
    server.socket.listen(_BACKLOG)  # Horovod's server has 5
    server.scope_size |= _scope_sizes(slots)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = server.server_address[1]
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def interface(address: str) -> dict[str, str]:
    """Environment variables for the network interface on which ranks listen.

    Args:
        address: Address of this host, by which the ranks of other hosts reach it.
    """
    name = interface_of(address)
    return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}


def _scope_sizes(slots: Sequence[Slot]) -> dict[str, int]:
    """Number of ranks that use each scope of the store; it is then emptied."""
    sizes = {}
    for slot in slots:
        sizes["global"] = slot.size
        sizes[f"local_{slot.host}"] = slot.local_size
        sizes[f"cross_{slot.local_rank}"] = slot.cross_size
    return sizes


def _guarded(handler: Any, secret: str) -> Any:
    """A subclass of Horovod's request handler that requires the secret."""

    class Guarded(handler):
        path: str

        def _has_secret(self) -> bool:
            first, _, rest = self.path.lstrip("/").partition("/")
            received = first.partition(":")[0]  # Horovod adds the port behind it
            self.path = f"/{rest}"
            if hmac.compare_digest(received.encode(), secret.encode()):
                return True
            self.close_connection = True
            self.send_status_code(_FORBIDDEN)
            return False

        def do_GET(self) -> None:
            if self._has_secret():
                super().do_GET()

        def do_PUT(self) -> None:
            if self._has_secret():
                super().do_PUT()

        def do_DELETE(self) -> None:
            if self._has_secret():
                super().do_DELETE()

        def do_HEAD(self) -> None:  # the inherited one shows files of this folder
            self.send_status_code(_FORBIDDEN)

    return Guarded
