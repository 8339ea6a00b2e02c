"""The rendezvous: Horovod's key-value store, protected by a secret of the job."""

import contextlib
import hashlib
import hmac
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence

from keras_dist.launch.guarded import guarded
from keras_dist.launch.hosts import LOOPBACK, Slot, interface_of

# Connections that the kernel accepts before the server does. Ranks connect all at once,
# and one that finds no room tries again only after 1, 3 and 7 s.
_BACKLOG = 1024

# Before the scopes of those who were admitted for all starts.
_OF_JOB = "job~"


@contextlib.contextmanager
def rendezvous(
    slots: Sequence[Slot], secret: str, address: str = LOOPBACK
) -> Iterator[dict[str, str]]:
    """Inside the block, an HTTP server runs in which the ranks find each other.

    It listens on one address, at a port that the system chooses; see `Store`.

    Args:
        slots: The slots of all ranks.
        secret: Secret of this job.
        address: Address of this host, by which the ranks reach the server.

    Yields:
        Environment variables for Horovod in each rank.

    Raises:
        RuntimeError: If Horovod is not installed.
    """
    store = Store(address)
    try:
        store.open(slots, secret)
        yield store.variables(secret)
    finally:
        store.close()


class Store:
    """Horovod's key-value store, for one start of a job after the other.

    It only answers requests whose path begins with a token that follows from a secret:
    whoever reads the token on the network has not got the secret, by which the ranks
    sign. The token is in the path because Horovod's client sends no headers; but it
    accepts an address with a path behind the port. Each start has a token and values
    of its own, and that of an earlier one is refused.

    Args:
        address: Address on which the store listens.
        port: Port; 0 for one that the system chooses.

    Raises:
        OSError: If it cannot listen there.
        RuntimeError: If Horovod is not installed.
    """

    def __init__(self, address: str = LOOPBACK, port: int = 0) -> None:
        try:
            http_server = importlib.import_module("horovod.runner.http.http_server")
        except ImportError as error:
            raise RuntimeError(
                f"Horovod is not installed here. Received: {error}. "
                "Run `keras-dist install-horovod`."
            ) from error
        # For each token: what stands before the names of its scopes.
        self._tokens: dict[str, str] = {}
        self._opened: tuple[str, int] | None = None
        # What strangers may read, too.
        self._public: dict[str, Callable[[], bytes]] = {}
        handler = guarded(http_server.RendezvousHandler, self._tokens, self._public)
        server = http_server.RendezvousHTTPServer((address, port), handler, 0)
        server.daemon_threads = True
        # What is no request at all is no traceback on the user's screen.
        server.handle_error = lambda request, address: None
        server.socket.listen(_BACKLOG)  # Horovod's server has 5
        self._server, self._address = server, address
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, daemon=True)
        self._thread.start()

    def open(self, slots: Sequence[Slot], secret: str) -> None:
        """Take requests of the ranks of a start, and no longer those of the last one.

        Args:
            slots: The slots of all ranks.
            secret: Secret of the start.
        """
        number = 0
        if self._opened is not None:
            token, number = self._opened[0], self._opened[1] + 1
            del self._tokens[token]
        self._opened = token_of(secret), number
        self._server.scope_size |= {
            f"{number}~{scope}": size for scope, size in _scope_sizes(slots).items()
        }
        self._tokens[token_of(secret)] = f"{number}~"

    def variables(self, secret: str) -> dict[str, str]:
        """Environment variables by which Horovod, in each rank, finds this store.

        Args:
            secret: Secret of the start, as of `open`.
        """
        return variables_of(self._address, self.port, secret)

    def admit(self, secret: str) -> None:
        """Take requests with this secret, too, to the end of the job."""
        self._tokens[token_of(secret)] = _OF_JOB

    def publish(self, name: str, make: Callable[[], bytes]) -> None:
        """Answer requests for this name without a token.

        Args:
            name: The path of the requests.
            make: Makes the answer, a new one for each request.
        """
        self._public[name] = make

    def values(self, scope: str) -> dict[str, bytes]:
        """What was written to a scope of those who were admitted, in its order."""
        with self._server.cache_lock:
            return dict(self._server.cache.get(f"{_OF_JOB}{scope}", {}))

    def write(self, scope: str, name: str, value: bytes) -> None:
        """Write a value for those who were admitted."""
        with self._server.cache_lock:
            self._server.cache.setdefault(f"{_OF_JOB}{scope}", {})[name] = value

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def token_of(secret: str) -> str:
    """What the paths of requests begin with."""
    return derived(secret, "store")


def derived(secret: str, purpose: str) -> str:
    """A secret for one purpose, from which the given one cannot be computed."""
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()[:32]


def secret_of_start(secret: str, nonce: str, start: int) -> str:
    """The secret of one start of a job, which the hosts compute each for itself.

    Args:
        secret: Secret of the job.
        nonce: A random text, new for each job.
        start: Number of the start.
    """
    return derived(secret, f"start {nonce} {start}")


def variables_of(address: str, port: int, secret: str) -> dict[str, str]:
    """Environment variables by which Horovod, in each rank, finds a store.

    Args:
        address: Address of the store.
        port: Its port.
        secret: The secret of the start, as of `Store.open`.
    """
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{token_of(secret)}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


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
