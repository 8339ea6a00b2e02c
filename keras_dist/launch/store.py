"""The key-value store of a job: Horovod's, guarded by a secret; and its client.

In it the ranks find each other (the rendezvous) and write heartbeats, and hosts write
their reports. `horovodrun` has one, too, without a secret.
"""

import contextlib
import hmac
import http.client
import importlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import LOOPBACK, Slot
from keras_dist.launch.network import EVERYWHERE
from keras_dist.launch.signing import derived, signed, verified
from keras_dist.version import __version__

# Connections that the kernel accepts before the server does. Ranks connect all at once,
# and one that finds no room tries again only after 1, 3 and 7 s.
_BACKLOG = 1024

# Before the scopes of those who were admitted for all starts.
_OF_JOB = "job~"

# The scope of our values, beside those of Horovod.
SCOPE = "keras_dist_watch"

# A name that ends so reads all values whose names begin with it.
_ALL = "*"

# Name of the value that describes a job, with a text that is another one for each.
JOB = "job"

_OK = 200
_BAD_REQUEST, _FORBIDDEN, _NOT_FOUND, _TIMEOUT = 400, 403, 404, 408

# Nobody is admitted yet: who has the right secret is to ask again.
_TOO_EARLY = 503

# Bytes of one value at most. The largest are the addresses that Gloo keeps for a rank,
# 0.15 MB where there are 1,000 ranks.
_LARGEST = 1 << 26

# Seconds for a request, and for the first one.
_SECONDS, _CONNECT_SECONDS = 2.0, 5.0

# Seconds between two attempts to connect, and between two lines about it; and how often
# what must arrive is sent.
_RETRY_SECONDS, _SAY_SECONDS, _ATTEMPTS = 0.5, 15.0, 5


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
        self._http = _horovods_server()
        # For each token: what stands before the names of its scopes.
        self._tokens: dict[str, str] = {}
        self._opened: tuple[str, int] | None = None
        self._address = address
        self._server = self._serving(port)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _serving(self, port: int) -> Any:
        handler = self._http.RendezvousHandler
        own = {"tokens": self._tokens, "inherited": handler}
        guarded = type("Guarded", (_Guard, handler), own)
        server = self._http.RendezvousHTTPServer((self._address, port), guarded, 0)
        server.daemon_threads = True
        # What is no request at all is no traceback on the user's screen.
        server.handle_error = lambda request, address: None
        server.socket.listen(_BACKLOG)  # Horovod's server has 5
        return server

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
        self._opened = store_token(secret), number
        # How many ranks use each scope; then it is emptied.
        sizes = self._server.scope_size
        for slot in slots:
            sizes[f"{number}~global"] = slot.size
            sizes[f"{number}~local_{slot.host}"] = slot.local_size
            sizes[f"{number}~cross_{slot.local_rank}"] = slot.cross_size
        self._tokens[store_token(secret)] = f"{number}~"

    def variables(self, secret: str) -> dict[str, str]:
        """Return the variables by which Horovod, in this host's ranks, finds it."""
        address = LOOPBACK if self._address == EVERYWHERE else self._address
        return variables_of(address, self.port, secret)

    def admit(self, secret: str) -> None:
        """Take requests with this secret, too, to the end of the job."""
        self._tokens[store_token(secret)] = _OF_JOB

    def values(self) -> dict[str, bytes]:
        """Return what those who were admitted have written, the first values first."""
        with self._server.cache_lock:
            return dict(self._server.cache.get(f"{_OF_JOB}{SCOPE}", {}))

    def write(self, name: str, value: bytes) -> None:
        """Write a value for those who were admitted."""
        with self._server.cache_lock:
            self._server.cache.setdefault(f"{_OF_JOB}{SCOPE}", {})[name] = value

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _horovods_server() -> Any:
    try:
        return importlib.import_module("horovod.runner.http.http_server")
    except ImportError as error:
        raise RuntimeError(
            f"Horovod is not installed here. Received: {error}. "
            "Run `keras-dist install-horovod`."
        ) from error


class _Guard:
    """What comes before the methods of Horovod's request handler: a token is needed."""

    tokens: Mapping[str, str]
    inherited: Any

    # Of Python's handler.
    path: str
    headers: Any
    server: Any
    rfile: Any
    wfile: Any
    close_connection: bool
    send_status_code: Any
    send_response: Any
    send_header: Any
    end_headers: Any
    _put_value: Any

    def do_GET(self) -> None:
        if self._is_admitted():
            if self.path.endswith(_ALL):
                self._answer(self._all_values())
            else:
                self.inherited.do_GET(self)

    def do_PUT(self) -> None:
        if not self._is_admitted():
            return
        length = self.headers.get("Content-Length") or ""
        if not re.fullmatch(r"\d{1,9}", length) or int(length) > _LARGEST:
            self._refuse(_BAD_REQUEST)
            return
        try:
            value = self.rfile.read(int(length))
        except TimeoutError:
            value = b""
        if len(value) < int(length):  # Horovod's would keep what has come
            self._refuse(_TIMEOUT)
            return
        _, scope, key = self.path.split("/")
        self._put_value(scope, key, value)
        self.send_status_code(_OK)

    def do_DELETE(self) -> None:
        if self._is_admitted():
            self.inherited.do_DELETE(self)

    def do_HEAD(self) -> None:  # the inherited one shows files of this folder
        self.send_status_code(_FORBIDDEN)

    def _is_admitted(self) -> bool:
        first, _, rest = self.path.lstrip("/").partition("/")
        received = first.partition(":")[0].encode()  # Horovod adds the port to it
        for token, prefix in list(self.tokens.items()):
            if hmac.compare_digest(received, token.encode()):
                self.path = f"/{prefix}{rest}"
                return rest.count("/") == 1 or self._refuse(_BAD_REQUEST)
        return self._refuse(_FORBIDDEN if self.tokens else _TOO_EARLY)

    def _refuse(self, status: int) -> bool:
        self.close_connection = True
        self.send_status_code(status)
        return False

    def _all_values(self) -> bytes:
        _, scope, prefix = self.path.removesuffix(_ALL).split("/")
        with self.server.cache_lock:
            values = dict(self.server.cache.get(scope, {}))
        found = {
            k: v.decode("latin-1") for k, v in values.items() if k.startswith(prefix)
        }
        return json.dumps(found).encode()

    def _answer(self, body: bytes) -> None:
        self.send_response(_OK)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class StoreClient:
    """Small JSON values by name, in the store of a job.

    With a secret each value carries a signature over its name and itself, and one that
    this job has not written counts as one that is not there.

    Args:
        address: Name or address of the store's host; or, as launchers pass it to
            Horovod, with port and token behind it.
        port: Port of the store.
        secret: Secret of the job; `None` for the values of one start.
    """

    def __init__(self, address: str, port: int, secret: str | None = None) -> None:
        self.address, self.port = address, port
        self._key = "" if secret is None else derived(secret, "hosts")
        if secret is not None:
            address = f"{address}:{port}/{store_token(secret)}"
        # Horovod makes its URLs in the same way: the token becomes the first part of
        # the path.
        url = urlsplit(f"http://{address}:{port}/{SCOPE}/")
        self._host, self._port, self._path = url.hostname, url.port, url.path

    def put(self, name: str, value: Any) -> bool:
        """Write a value; whether the store could be reached."""
        text = signed(self._key, json.dumps(value).encode(), name=name)
        return self._request("PUT", name, text) is not None

    def put_surely(self, name: str, value: Any) -> None:
        """Write what others wait for: the store may be busy."""
        any(self.put(name, value) for _ in range(_ATTEMPTS))

    def get(self, name: str) -> Any:
        """Read a value; `None` if there is none, or the store cannot be reached."""
        return self._value(name, self._request("GET", name))

    def get_all(self, prefix: str) -> dict[str, Any] | None:
        """Read all values whose names begin with a prefix, by one request.

        Returns:
            `None` if the store cannot be reached, or is Horovod's, which cannot do it.
        """
        found = _json(self._request("GET", f"{prefix}{_ALL}"))
        if not isinstance(found, dict):
            return None
        texts = {name: str(text).encode("latin-1") for name, text in found.items()}
        return {name: self._value(name, text) for name, text in texts.items()}

    def of_kind(self, kind: str) -> dict[str, Any]:
        """Read all values with names of the form KIND.REST, by the rest, in order."""
        found = self.get_all(f"{kind}.") or {}
        return {name.partition(".")[2]: value for name, value in found.items()}

    def probe(self) -> tuple[str, str]:
        """Find out whether the store takes this host's requests.

        Returns:
            The address of this host on the network to the store, and the address of
            the store there.

        Raises:
            OSError: If it cannot be reached, or does not answer as a store does.
            PermissionError: If it refuses this host's secret.
        """
        where = self.address, self.port
        with socket.create_connection(where, _CONNECT_SECONDS) as link:
            own, theirs = link.getsockname(), link.getpeername()
        connection = http.client.HTTPConnection(
            str(self._host), self._port, timeout=_CONNECT_SECONDS
        )
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"{self._path}probe")
                status = connection.getresponse().status
            except (http.client.HTTPException, ConnectionResetError) as error:
                raise ConnectionError(f"no store answers: {error!r}") from error
        if status == _FORBIDDEN:
            raise PermissionError(f"refused with status {status}")
        if status not in (_OK, _NOT_FOUND):
            raise ConnectionError(f"no store answers: status {status}")
        return str(own[0]), str(theirs[0])

    def wait(
        self, host: str, *, timeout: float, stopped: Sequence[int] = ()
    ) -> tuple[str, str] | None:
        """Wait until the store answers `probe`; `None` if `stopped` is filled before.

        Args:
            host: Name of this host, for messages.
            timeout: Seconds to wait.
            stopped: Numbers of the signals that this process has received.

        Raises:
            ValueError: If the store cannot be reached, or refuses the secret.
        """
        meeting = f"{self.address}:{self.port}"
        begin = said = time.monotonic()
        while not stopped:
            try:
                return self.probe()
            except PermissionError as error:
                raise ValueError(
                    "The first host refuses this one. Received: another secret than "
                    f"that of the job at {meeting}. Give all hosts the same "
                    "KERAS_DIST_SECRET or `--secret-file`."
                ) from error
            except OSError as error:
                text = f"{host} cannot reach {meeting} ({error})"
                now = time.monotonic()
                if now - begin > timeout:
                    raise ValueError(
                        f"The first host cannot be reached. Received: {text}, for "
                        f"{timeout:g} s. Start the same command there, and open all "
                        "ports between the hosts."
                    ) from error
                if now - said > _SAY_SECONDS:
                    said = now
                    print_message(f"keras-dist: still waiting: {text}.")
                time.sleep(_RETRY_SECONDS)
        return None

    def _value(self, name: str, text: bytes | None) -> Any:
        return _json(verified(self._key, text or b"", name=name))

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> bytes | None:
        """Send a request; return the body of the answer, `None` if it is none."""
        if self._host is None:
            return None
        link = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        with contextlib.closing(link):
            try:
                link.request(method, self._path + name, body)
                response = link.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException):
                return None
        return text if response.status == _OK else None


class OwnStoreClient(StoreClient):
    """The same values in the process that has the store.

    One of them has a random text, by which a host notices that the command of the first
    host was started again: then nobody knows of this host.

    Args:
        store: The store.
        secret: Secret of the job, which is admitted from now on.
        num_hosts: Number of hosts of the job.
    """

    def __init__(self, store: Store, secret: str, *, num_hosts: int = 1) -> None:
        super().__init__("localhost", store.port, secret)
        self._store, self.nonce = store, secrets.token_hex(16)
        version = {"num_hosts": num_hosts, "version": __version__}
        self.put(JOB, {"nonce": self.nonce, **version})
        store.admit(secret)

    def get_all(self, prefix: str) -> dict[str, Any]:
        texts = self._store.values()
        found = {n: self._value(n, t) for n, t in texts.items() if n.startswith(prefix)}
        return {name: value for name, value in found.items() if value is not None}

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> bytes | None:
        if method == "PUT":
            self._store.write(name, body or b"")
            return b""
        return self._store.values().get(name)


def client_of(environ: Mapping[str, str] | None = None) -> StoreClient | None:
    """Return the client of the launcher's store; `None` if the launcher has none.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return StoreClient(address, int(port)) if address and port else None


def store_token(secret: str) -> str:
    """Return what the paths of requests begin with."""
    return derived(secret, "store")


def secret_of_start(secret: str, nonce: str, start: int) -> str:
    """Return the secret of one start of a job, which each host computes for itself.

    Args:
        secret: Secret of the job.
        nonce: A random text, new for each job.
        start: Number of the start.
    """
    return derived(secret, f"start {nonce} {start}")


def variables_of(address: str, port: int, secret: str) -> dict[str, str]:
    """Return the variables by which Horovod, in each rank, finds a store.

    Args:
        address: Address of the store.
        port: Its port.
        secret: The secret of the start, which `Store.open` was given.
    """
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{store_token(secret)}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _json(text: bytes | None) -> Any:
    try:
        return json.loads(text or b"null")
    except (ValueError, RecursionError):  # not written by `put`
        return None
