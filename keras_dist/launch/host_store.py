"""Values that the hosts of a job write for the first one, and it for them: signed."""

import hashlib
import hmac
import http.client
import json
import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from keras_dist.launch.failures import print_message
from keras_dist.launch.hosts import LOOPBACK
from keras_dist.launch.monitor.status_store import SCOPE, StatusStore
from keras_dist.launch.relays import Exit
from keras_dist.launch.rendezvous import Store, derived, token_of
from keras_dist.launch.tls import digest_at

_OK, _NOT_FOUND = 200, 404
_SECONDS = 5.0

# Name of the text that is another one for each job.
NONCE = "nonce"

_MISSING = "or `--tls` is missing on one host"

# Seconds between two attempts, and between two lines while it waits.
_RETRY_SECONDS, _SAY_SECONDS = 0.5, 15.0


class HostStore(StatusStore):
    """The store of a job as one of its hosts sees it.

    Each value carries a signature over its name and itself. One that this job has not
    written counts as one that is not there.

    Args:
        address: Name or address of the first host.
        port: Port of the store.
        secret: Secret of the job.
        has_tls: Whether it is reached by TLS.
    """

    def __init__(
        self, address: str, port: int, secret: str, *, has_tls: bool = False
    ) -> None:
        self.address, self.port = address, port
        self._secret, self._has_tls = secret, has_tls
        self._exit: Exit | None = None
        self._key = derived(secret, "hosts").encode()
        super().__init__(f"{address}:{port}/{token_of(secret)}", str(port))

    def put(self, name: str, value: Any) -> bool:
        """Write a value; whether the store could be reached."""
        return self._request("PUT", name, self._signed(name, value)) is not None

    def knock(self) -> tuple[str, str]:
        """Find out whether the store takes this host's requests.

        Returns:
            The address of this host on the network to the store, and the address of
            the store there.

        Raises:
            OSError: If it cannot be reached, or does not answer as a store does.
            PermissionError: If it refuses this host's secret.
        """
        with socket.create_connection((self.address, self.port), _SECONDS) as link:
            own, theirs = link.getsockname(), link.getpeername()
            if self._has_tls and self._exit is None:
                digest = _digest_at(link, self._secret)
                self._exit = Exit(self.address, self.port, digest)
                self._exit.start()
                self._host, self._port = LOOPBACK, self._exit.port
        assert self._host is not None
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=_SECONDS
        )
        try:
            connection.request("GET", f"{self._path}knock")
            status = connection.getresponse().status
        except (http.client.HTTPException, ConnectionResetError) as error:
            raise ConnectionError(f"no store answers, {_MISSING}: {error!r}") from error
        finally:
            connection.close()
        if status == http.client.FORBIDDEN:
            raise PermissionError(f"refused with status {status}")
        if status not in (_OK, _NOT_FOUND):
            raise ConnectionError(f"no store answers: status {status}")
        return str(own[0]), str(theirs[0])

    def near(self, reached: str) -> tuple[str, int]:
        """Address and port by which the ranks of this host reach the store.

        Args:
            reached: Its address, as of `knock`.
        """
        return (
            (reached, self.port) if self._exit is None else (LOOPBACK, self._exit.port)
        )

    def _signed(self, name: str, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return self._signature(name, text) + text

    def _decoded(self, name: str, body: bytes | None) -> Any:
        signature, text = (body or b"")[:64], (body or b"")[64:]
        if not hmac.compare_digest(signature, self._signature(name, text)):
            return None
        return json.loads(text)

    def _signature(self, name: str, text: bytes) -> bytes:
        message = name.encode() + b"\n" + text
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()


class FirstHostStore(HostStore):
    """The same values in the process that has the store.

    One of them is a random text, by which a host notices that the command of the first
    host was started again: then nobody knows of this host.

    Args:
        store: The store.
        secret: Secret of the job, which is admitted from now on.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__("localhost", store.port, secret)
        self._store, self.nonce = store, secrets.token_hex(16)
        self.put(NONCE, self.nonce)
        store.admit(secret)

    def of_kind(self, kind: str) -> dict[str, Any]:
        """All values with names of the form KIND.REST, by the rest, in their order."""
        found = self.get_all(f"{kind}.")
        return {name.partition(".")[2]: value for name, value in found.items()}

    def get_all(self, prefix: str) -> dict[str, Any]:
        """All values whose names begin with a prefix, the first ones first."""
        found = {
            name: self._decoded(name, body)
            for name, body in self._store.values(SCOPE).items()
            if name.startswith(prefix)
        }
        return {name: value for name, value in found.items() if value is not None}

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> bytes | None:
        if method == "PUT":
            self._store.write(SCOPE, name, body or b"")
            return b""
        return self._store.values(SCOPE).get(name)


def _digest_at(link: socket.socket, secret: str) -> str:
    try:
        return digest_at(link, secret)
    except ssl.SSLError as error:
        raise ConnectionError(f"no TLS answers, {_MISSING}: {error}") from error


def wait_for(
    store: HostStore, host: str, *, timeout: float, stopped: Sequence[int] = ()
) -> tuple[str, str] | None:
    """Wait until the store of a job answers.

    Args:
        store: The store.
        host: Name of this host.
        timeout: Seconds to wait.
        stopped: The wait ends as soon as this list is not empty.

    Returns:
        As of `HostStore.knock`; `None` if it was stopped.

    Raises:
        ValueError: If the store cannot be reached, or refuses the secret.
    """
    meeting = f"{store.address}:{store.port}"
    begin = said = time.monotonic()
    while not stopped:
        try:
            return store.knock()
        except PermissionError as error:
            raise ValueError(
                "The first host refuses this one. Received: another secret than that "
                f"of the job at {meeting}. Give all hosts the same KERAS_DIST_SECRET "
                "or `--secret-file`."
            ) from error
        except OSError as error:
            text = f"{host} cannot reach {meeting} ({error})"
            now = time.monotonic()
            if now - begin > timeout:
                raise ValueError(
                    f"The first host cannot be reached. Received: {text}, for "
                    f"{timeout:g} s. Start the same command there, and open all ports "
                    "between the hosts."
                ) from error
            if now - said > _SAY_SECONDS:
                said = now
                print_message(f"keras-dist: still waiting: {text}.")
            time.sleep(_RETRY_SECONDS)
    return None
