"""Where the ranks of one job find each other: Horovod's store, with a secret."""

import contextlib
import hmac
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LOCAL = "127.0.0.1"
_FORBIDDEN = 403


@dataclass(frozen=True)
class Slot:
    """The place of one rank, as Horovod wants to be told.

    Args:
        rank: From 0.
        size: Of the job.
        host: Its name in `-H`.
        local_rank: Among the ranks of that host.
        local_size: How many these are.
        cross_rank: Among the ranks of other hosts with its local rank.
        cross_size: How many these are.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> dict[str, str]:
        """Variables from which Horovod learns the place."""
        return {
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
        }


def slots(num_ranks: int) -> list[Slot]:
    """The places of ranks on this host.

    >>> [(slot.rank, slot.local_rank, slot.cross_size) for slot in slots(2)]
    [(0, 0, 1), (1, 1, 1)]
    """
    return [
        Slot(
            rank=rank,
            size=num_ranks,
            host="localhost",
            local_rank=rank,
            local_size=num_ranks,
            cross_rank=0,
            cross_size=1,
        )
        for rank in range(num_ranks)
    ]


@contextlib.contextmanager
def rendezvous(places: list[Slot], secret: str) -> Iterator[dict[str, str]]:
    """Inside the block, the ranks of this host can find each other.

    The store listens on the loopback interface alone and answers who knows the secret,
    which is the beginning of each path: Horovod's client sends no headers, but takes
    what stands behind the port in its address for a part of the path.

    Args:
        places: Of all ranks.
        secret: Of this job.

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
    server = horovods.RendezvousHTTPServer((_LOCAL, 0), handler, 0)
    server.daemon_threads = True
    server.scope_size |= _scope_sizes(places)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = server.server_address[1]
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{_LOCAL}:{port}/{secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _scope_sizes(places: list[Slot]) -> dict[str, int]:
    """How many ranks use each part of the store before it is emptied."""
    sizes = {}
    for place in places:
        sizes["global"] = place.size
        sizes[f"local_{place.host}"] = place.local_size
        sizes[f"cross_{place.local_rank}"] = place.cross_size
    return sizes


def _guarded(handler: Any, secret: str) -> Any:
    """A handler of Horovod's that answers only who knows the secret."""

    class Guarded(handler):
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
