"""Where the ranks of one job find each other: Horovod's store, with a secret."""

import contextlib
import hmac
import importlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist.launch.hosts import LOOPBACK, Slot, interface_of

_FORBIDDEN = 403


@contextlib.contextmanager
def rendezvous(
    slots: Sequence[Slot], secret: str, address: str = LOOPBACK
) -> Iterator[dict[str, str]]:
    """Inside the block, the ranks can find each other.

    The store listens at one address and answers who knows the secret, which is the
    beginning of each path: Horovod's client sends no headers, but takes what stands
    behind the port in its address for a part of the path.

    Args:
        slots: Of all ranks.
        secret: Of this job.
        address: Of this host, by which the ranks reach the store.

    Yields:
        What Horovod has to find in the environment of each rank.

    Raises:
        RuntimeError: If Horovod is not installed.
    """
    try:
        horovods = importlib.import_module("horovod.runner.http.http_server")
    except ImportError as error:
        raise RuntimeError(
            f"Horovod is not installed here. Received: {error}. "
            "Run `keras-dist install-horovod`."
        ) from error
    handler = _guarded(horovods.RendezvousHandler, secret)
    server = horovods.RendezvousHTTPServer((address, 0), handler, 0)
    server.daemon_threads = True
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
    """What says on which interface the ranks of this host listen.

    Args:
        address: Of this host, by which the ranks of others reach it.
    """
    name = interface_of(address)
    return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}


def _scope_sizes(slots: Sequence[Slot]) -> dict[str, int]:
    """How many ranks use each part of the store before it is emptied."""
    sizes = {}
    for slot in slots:
        sizes["global"] = slot.size
        sizes[f"local_{slot.host}"] = slot.local_size
        sizes[f"cross_{slot.local_rank}"] = slot.cross_size
    return sizes


def _guarded(handler: Any, secret: str) -> Any:
    """A handler of Horovod's that answers only who knows the secret."""

    class Guarded(handler):
        path: str

        def _is_known(self) -> bool:
            first, _, rest = self.path.lstrip("/").partition("/")
            given = first.partition(":")[0]  # Horovod adds the port behind it
            self.path = f"/{rest}"
            if hmac.compare_digest(given.encode(), secret.encode()):
                return True
            self.close_connection = True
            self.send_status_code(_FORBIDDEN)
            return False

        def do_GET(self) -> None:
            if self._is_known():
                super().do_GET()

        def do_PUT(self) -> None:
            if self._is_known():
                super().do_PUT()

        def do_DELETE(self) -> None:
            if self._is_known():
                super().do_DELETE()

        def do_HEAD(self) -> None:  # Horovod's would tell of files in this folder
            self.send_status_code(_FORBIDDEN)

    return Guarded
