"""The key-value store of a job: Horovod's ranks find each other there.

Ranks also write heartbeats to it, and hosts their reports. `horovodrun` has one, too.
"""

import contextlib
import hmac
import http.client
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from keras_dist.launch.hosts import LOOPBACK, addresses, is_loopback
from keras_dist.launch.signing import add_signature, derive_secret, read_signed

# Connections that the kernel accepts before the server does. Ranks connect all at once,
# and one that finds no room tries again only after 1, 3 and 7 s.
_BACKLOG = 1024

# What ranks write, and what hosts write, beside what Horovod writes.
_RANKS, _HOSTS = "keras_dist_watch", "keras_dist_hosts"

# A name that ends so reads all values whose names begin with it.
_ALL = "*"

# Seconds for which a rank waits for the others to connect: importing TensorFlow may
# take a minute longer on one host than on another one.
_CONNECT, _CONNECT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS", "120"

# Seconds for a request; and how often a value is sent that must arrive, though the
# store is busy.
_SECONDS, MANY = 2.0, 5


# The numbers of a rank, as Horovod has them in its variables.
Slot = dict[str, str]

_NAMES = "HOSTNAME RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE"


def make_slots(ranks: Sequence[tuple[str, int, int]]) -> list[Slot]:
    """Return the slot of each rank, from host, local rank and local size of each.

    >>> slots = make_slots([("a", 0, 2), ("b", 0, 1), ("a", 1, 2)])
    >>> slots[1]["HOROVOD_CROSS_RANK"]
    '1'
    """
    cross_sizes = Counter(local_rank for _, local_rank, _ in ranks)
    before: Counter[int] = Counter()
    first_ranks: Counter[str] = Counter()
    slots = []
    for rank, (host, local, local_size) in enumerate(ranks):
        # One host may have the ranks of two launchers, each with a local rank 0.
        first_ranks[host] += local == 0
        name = host if first_ranks[host] <= 1 else f"{host}-{first_ranks[host]}"
        cross = before[local], cross_sizes[local]
        values = name, rank, len(ranks), local, local_size, *cross
        names = (f"HOROVOD_{each}" for each in _NAMES.split())
        slots.append(dict(zip(names, map(str, values), strict=True)))
        before[local] += 1
    return slots


def store_variables(
    address: str, port: int, secret: str, *, start: int = 0
) -> dict[str, str]:
    """Return the variables by which Horovod, in each rank, finds a store.

    Ranks of each start of a job have values of their own.
    """
    # Horovod makes URLs of it that begin with `http://ADDRESS:PORT/TOKEN/START:PORT/`.
    token = derive_secret(secret, "store")
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{token}/{start}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        _CONNECT: os.environ.get(_CONNECT) or _CONNECT_SECONDS,
    }


class Store(ThreadingTCPServer):
    """Keeps values by the paths of their URLs, in threads of this process.

    It only answers requests whose path begins with a token that follows from the job's
    secret: whoever reads the token on the network has not got the secret, by which
    hosts and ranks sign. The token is in the path because Horovod's client sends no
    headers.

    Args:
        secret: Secret of the job.
        address: Name or address of this host, as others know it.
        port: Port; 0 for one that the system chooses.
        is_alone: Whether all processes that use the store are on this host.

    Raises:
        OSError: If the port is in use.
    """

    request_queue_size = _BACKLOG
    allow_reuse_address = daemon_threads = True

    def __init__(
        self,
        secret: str,
        address: str = LOOPBACK,
        port: int = 0,
        *,
        is_alone: bool = True,
    ) -> None:
        self.token = derive_secret(secret, "store").encode()
        # Read and written by one call each, which no other thread interrupts.
        self.values: dict[str, bytes] = {}
        # This host may know itself by another address, as by Debian's 127.0.1.1, or not
        # know its name yet: then it listens at all addresses.
        found = ""
        with contextlib.suppress(OSError):
            found = socket.gethostbyname(address)
        is_seen = is_alone or is_loopback(address) or not is_loopback(found)
        if not is_seen or found not in addresses().values():
            found = ""
        try:
            super().__init__((found, port), _Handler)
        except OSError as error:
            raise OSError(
                f"The job's store cannot listen at {address}:{port}. Received: "
                f"{error}. Another program may use the port: start the job again, or "
                "name another port on all hosts (--rdzv, MASTER_PORT, TF_CONFIG; "
                "KERAS_DIST_RDZV under srun and Kubernetes)."
            ) from error
        # The address and port at which this host reaches it.
        self.address = found or LOOPBACK
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=[0.1], daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Show no traceback for what is no request."""


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET`, `PUT` and `DELETE /TOKEN…`."""

    server: Store
    timeout = 3.0

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        if self.path.endswith(_ALL):
            prefix = self.path.removesuffix(_ALL)
            value = b"\n".join(
                path.rpartition("/")[2].encode() + b" " + each
                for path, each in self.server.values.copy().items()
                if path.startswith(prefix)
            )
        self._answer(
            HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b""
        )

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.values[self.path] = value
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        token = self.path.lstrip("/").partition("/")[0].encode()
        if hmac.compare_digest(token, self.server.token):
            return True
        self._answer(HTTPStatus.FORBIDDEN)
        return False

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class StoreClient:
    """Small JSON values by name, in the store of a job.

    With a secret each value carries a signature over its name and itself, and one that
    this job has not written counts as one that is not there.

    Args:
        address: Name or address of the store's host; or, as launchers pass it to
            Horovod, with port and token behind it.
        port: Port of the store.
        secret: Secret of the job, for the values of hosts; `None` for values of ranks.

    Attributes:
        host: Name or address of the store.
        ends: Address of this host on the network to the store, and that of the store
            there, as of the last request.
        error: Why the last request had no answer, or what it was.
        is_refused: Whether the store has another secret.
    """

    def __init__(self, address: str, port: int, secret: str | None = None) -> None:
        self.ends, self.error, self.is_refused = ("", ""), "", False
        self._key, scope = "", _RANKS
        if secret is not None:
            self._key, scope = derive_secret(secret, "hosts"), _HOSTS
            address = f"{address}:{port}/{derive_secret(secret, 'store')}/-"
        url = urlsplit(f"http://{address}:{port}/{scope}/")  # as Horovod makes it
        self.host, self._port, self._path = url.hostname or "", url.port, url.path

    def put(self, name: str, value: Any, *, attempts: int = 1) -> bool:
        """Write a value; whether the store could be reached in so many attempts."""
        text = add_signature(self._key, json.dumps(value).encode(), name=name)
        return any(
            self._request("PUT", name, text) is not None for _ in range(attempts)
        )

    def get(self, name: str) -> Any:
        """Read a value; `None` if there is none, or the store cannot be reached."""
        return self._read(name, self._request("GET", name))

    def get_all(self, prefix: str) -> dict[str, Any] | None:
        """Read all values whose names begin with a prefix, by one request.

        Returns:
            `None` if the store cannot be reached, or is Horovod's, which cannot do it.
        """
        found = self._request("GET", f"{prefix}{_ALL}")
        if found is None:
            return None
        pairs = (
            line.decode(errors="replace").partition(" ") for line in found.splitlines()
        )
        return {name: self._read(name, text.encode()) for name, _, text in pairs}

    def _read(self, name: str, text: bytes | None) -> Any:
        try:
            return json.loads(read_signed(self._key, text or b"", name=name) or b"null")
        except (ValueError, RecursionError):  # not written by `put`
            return None

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> bytes | None:
        """Send a request; return the body of the answer, `None` if it is none."""
        link = http.client.HTTPConnection(self.host, self._port, timeout=_SECONDS)
        try:
            with contextlib.closing(link):
                link.connect()
                self.ends = link.sock.getsockname()[0], link.sock.getpeername()[0]
                link.request(method, self._path + name, body)
                response = link.getresponse()
                text, self.error = response.read(), f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            self.error = str(error)
            return None
        self.is_refused = response.status == HTTPStatus.FORBIDDEN
        return text if response.status == HTTPStatus.OK else None


def find_store(environ: Mapping[str, str] | None = None) -> StoreClient | None:
    """Return the client of the launcher's store; `None` if the launcher has none."""
    environ = os.environ if environ is None else environ
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return StoreClient(address, int(port)) if address and port else None
