"""Horovod's rendezvous: how it numbers ranks, and its key-value store behind a token.

In the store the ranks find each other (the rendezvous) and write heartbeats, and hosts
write their reports. `horovodrun` has one, too, without a token.
"""

import contextlib
import hmac
import http.client
import importlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.network import EVERYWHERE, addresses, is_loopback
from keras_dist.launch.signing import derived, signed, verified

# Connections that the kernel accepts before the server does. Ranks connect all at once,
# and one that finds no room tries again only after 1, 3 and 7 s.
_BACKLOG = 1024

# The scope of values of the ranks, and that of the hosts, beside those of Horovod.
SCOPE, _HOSTS = "keras_dist_watch", "keras_dist_hosts"

# A name that ends so reads all values whose names begin with it.
_ALL = "*"

# Between two looks of the server whether it is to end.
_POLL_SECONDS = 0.1

_OK, _FORBIDDEN, _NOT_FOUND = 200, 403, 404

# Seconds for a request, between two attempts to connect, and between two lines about
# it; and how often what must arrive is sent.
_SECONDS, _RETRY_SECONDS, _SAY_SECONDS, _ATTEMPTS = 2.0, 0.5, 15.0, 5


def assign_ranks(hosts: Sequence[tuple[str, int]]) -> list[Any]:
    """Number the ranks of a job as Horovod does, host by host.

    Args:
        hosts: Name and number of ranks of each host; each name once.

    Returns:
        Horovod's `SlotInfo` of each rank.

    >>> [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.cross_size)
    ...  for s in assign_ranks([("a", 2), ("b", 1)])]
    [('a', 0, 0, 0, 2), ('a', 1, 1, 0, 1), ('b', 2, 0, 1, 2)]

    Raises:
        RuntimeError: If Horovod is not installed.
    """
    _, horovod = _import_horovod()
    infos = [horovod.HostInfo(name, count) for name, count in hosts]
    slots: list[Any] = horovod.get_host_assignments(infos, sum(n for _, n in hosts))
    return slots


def make_slot(*fields: Any) -> Any:
    """Make Horovod's `SlotInfo` of a rank whose numbers a launcher has given."""
    return _import_horovod()[1].SlotInfo(*fields)


def slot_variables(slot: Any) -> dict[str, str]:
    """Return the variables that pass a slot to Horovod."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
    }


def store_variables(address: str, port: int, secret: str) -> dict[str, str]:
    """Return the variables by which Horovod, in each rank, finds a store.

    Args:
        address: Address of the store.
        port: Its port.
        secret: The secret that `Store` was given.
    """
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{store_token(secret)}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def store_token(secret: str) -> str:
    """Return what the paths of requests begin with."""
    return derived(secret, "store")


class Store:
    """Horovod's key-value store, in a thread of this process.

    It only answers requests whose path begins with a token that follows from the job's
    secret: whoever reads the token on the network has not got the secret, by which
    hosts and ranks sign. The token is in the path because Horovod's client sends no
    headers; but it accepts an address with a path behind the port.

    Args:
        secret: Secret of the job.
        address: Address on which the store listens.
        port: Port; 0 for one that the system chooses.

    Raises:
        OSError: If it cannot listen there.
        RuntimeError: If Horovod is not installed.
    """

    def __init__(self, secret: str, address: str = LOOPBACK, port: int = 0) -> None:
        horovod, _ = _import_horovod()
        handler = _guard(horovod.RendezvousHandler, store_token(secret))
        self._server = horovod.RendezvousHTTPServer((address, port), handler, 0)
        self._server.daemon_threads = True
        # What is no request at all is no traceback on the user's screen.
        self._server.handle_error = lambda request, address: None
        self._server.socket.listen(_BACKLOG)  # Horovod's server has 5
        self.port = int(self._server.server_address[1])
        # The address at which this host reaches it.
        self.address = LOOPBACK if address == EVERYWHERE else address
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_SECONDS], daemon=True
        )
        self._thread.start()

    def open(self, slots: Sequence[Any]) -> None:
        """Forget the values of the last start, and let the ranks of a new one meet.

        Args:
            slots: The slots of all ranks, by `assign_ranks`.
        """
        kept = self._server.cache.get(_HOSTS, {})  # what hosts have written
        self._server.init(slots)
        with self._server.cache_lock:
            self._server.cache[_HOSTS] = kept | self._server.cache.get(_HOSTS, {})

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_at(address: str, port: int, secret: str, *, is_alone: bool) -> Store:
    """Make the store of a job at the address by which others know this host.

    If this host knows itself by another address, as by Debian's 127.0.1.1, or does not
    know its name, the store listens at all of its addresses.

    Args:
        address: Name or address of this host.
        port: Port of the store.
        secret: Secret of the job.
        is_alone: Whether all processes that use the store are on this host.

    Raises:
        OSError: If the port is in use.
        RuntimeError: If Horovod is not installed.
    """
    found = EVERYWHERE
    with contextlib.suppress(OSError):  # the name may become known later
        found = socket.gethostbyname(address)
    is_known = found in addresses().values()
    if is_loopback(found):
        is_known = is_alone or is_loopback(address)
    found = found if is_known else EVERYWHERE
    try:
        return Store(secret, found, port)
    except OSError as error:
        raise OSError(
            f"The job's store cannot listen at {address}:{port}. Received: {error}. "
            "Another program may use the port: start the job again, or name another "
            "port on all hosts (--rdzv, MASTER_PORT, TF_CONFIG, KERAS_DIST_RDZV; that "
            "of srun follows from the numbers of job and step)."
        ) from error


def _import_horovod() -> tuple[Any, Any]:
    """Return Horovod's modules with the server, and with the numbering of ranks."""
    try:
        return (
            importlib.import_module("horovod.runner.http.http_server"),
            importlib.import_module("horovod.runner.common.util.hosts"),
        )
    except ImportError as error:
        raise RuntimeError(
            f"Horovod is not installed here. Received: {error}. "
            "Run `keras-dist install-horovod`."
        ) from error


def _guard(handler: Any, token: str) -> Any:
    """Return a class like Horovod's handler of requests, which asks for the token."""

    class Guarded(handler):  # type: ignore[misc]
        path: str

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            first, _, rest = self.path.lstrip("/").partition("/")
            received = first.partition(":")[0]  # Horovod adds the port to it
            is_admitted = hmac.compare_digest(received.encode(), token.encode())
            # Of Python's own handler, which shows files of this folder.
            if not is_admitted or self.command not in ("GET", "PUT", "DELETE"):
                self.close_connection = True
                self.send_status_code(_FORBIDDEN)
                return False
            self.path = f"/{rest}"
            return True

        def do_GET(self) -> None:
            if not self.path.endswith(_ALL):
                return super().do_GET()
            _, scope, prefix = self.path.removesuffix(_ALL).split("/")
            with self.server.cache_lock:
                values = dict(self.server.cache.get(scope, {}))
            found = {
                n: v.decode("latin-1")
                for n, v in values.items()
                if n.startswith(prefix)
            }
            body = json.dumps(found).encode()
            self.send_response(_OK)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Guarded


class StoreClient:
    """Small JSON values by name, in the store of a job.

    With a secret each value carries a signature over its name and itself, and one that
    this job has not written counts as one that is not there.

    Args:
        address: Name or address of the store's host; or, as launchers pass it to
            Horovod, with port and token behind it.
        port: Port of the store.
        secret: Secret of the job, for the values of hosts; `None` for those of ranks.
    """

    def __init__(self, address: str, port: int, secret: str | None = None) -> None:
        self.address, self.port = address, port
        self._key, scope = "", SCOPE
        if secret is not None:
            self._key, scope = derived(secret, "hosts"), _HOSTS
            address = f"{address}:{port}/{store_token(secret)}"
        # Horovod makes its URLs in the same way: the token becomes the first part of
        # the path.
        url = urlsplit(f"http://{address}:{port}/{scope}/")
        self._host, self._port, self._path = url.hostname or "", url.port, url.path

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

    def wait(
        self, host: str, *, timeout: float, stopped: Sequence[int] = ()
    ) -> tuple[str, str] | None:
        """Wait until the store takes this host's requests.

        Args:
            host: Name of this host, for messages.
            timeout: Seconds to wait.
            stopped: Numbers of the signals that this process has received.

        Returns:
            The address of this host on the network to the store, and the address of
            the store there; `None` if a signal came before.

        Raises:
            ValueError: If the store cannot be reached, or refuses the secret.
        """
        meeting = f"{self.address}:{self.port}"
        begin = said = time.monotonic()
        while not stopped:
            try:
                status, _, ends = self._send("GET", "probe")
            except (OSError, http.client.HTTPException) as error:
                cause = str(error)
            else:
                if status in (_OK, _NOT_FOUND):
                    return ends
                if status == _FORBIDDEN:
                    raise ValueError(
                        "The first host refuses this one. Received: another secret "
                        f"than that of the job at {meeting}. Give all hosts the same "
                        "KERAS_DIST_SECRET."
                    )
                cause = f"no store answers: status {status}"
            text, now = f"{host} cannot reach {meeting} ({cause})", time.monotonic()
            if now - begin > timeout:
                raise ValueError(
                    f"The first host cannot be reached. Received: {text}, for "
                    f"{timeout:g} s. Start the same command there, and open all ports "
                    "between the hosts."
                )
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
        try:
            status, text, _ = self._send(method, name, body)
        except (OSError, http.client.HTTPException):
            return None
        return text if status == _OK else None

    def _send(
        self, method: str, name: str, body: bytes | None = None
    ) -> tuple[int, bytes, tuple[str, str]]:
        """Send a request; return status, body, and the addresses of both ends."""
        link = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        with contextlib.closing(link):
            link.connect()
            ends = link.sock.getsockname()[0], link.sock.getpeername()[0]
            link.request(method, self._path + name, body)
            response = link.getresponse()
            return response.status, response.read(), ends


def client_of(environ: Mapping[str, str] | None = None) -> StoreClient | None:
    """Return the client of the launcher's store; `None` if the launcher has none.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return StoreClient(address, int(port)) if address and port else None


def _json(text: bytes | None) -> Any:
    try:
        return json.loads(text or b"null")
    except (ValueError, RecursionError):  # not written by `put`
        return None
