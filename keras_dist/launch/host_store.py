"""Values that the hosts of a job write for the first one, and it for them: signed."""

import hashlib
import hmac
import http.client
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from keras_dist.launch.failures import print_message
from keras_dist.launch.rendezvous import Store, derived, token_of
from keras_dist.monitor.status_store import SCOPE, StatusStore

_OK, _NOT_FOUND = 200, 404
_SECONDS = 5.0

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
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        self.address, self.port = address, port
        self._key = derived(secret, "hosts").encode()
        super().__init__(f"{address}:{port}/{token_of(secret)}", str(port))

    def put(self, name: str, value: Any) -> bool:
        """Write a value; whether the store could be reached."""
        return self._request("PUT", name, self._signed(name, value)) is not None

    def get(self, name: str) -> Any:
        """Read a value; `None` if there is none, or the store cannot be reached."""
        return self._verified(name, self._request("GET", name))

    def knock(self) -> tuple[str, str]:
        """Find out whether the store takes this host's requests.

        Returns:
            The address of this host on the network to the store, and the address of
            the store there.

        Raises:
            OSError: If it cannot be reached, or does not answer as a store does.
            PermissionError: If it refuses this host's secret.
        """
        connection = http.client.HTTPConnection(self.address, self.port, _SECONDS)
        connection.timeout = _SECONDS
        try:
            connection.connect()
            assert isinstance(connection.sock, socket.socket)
            own, theirs = connection.sock.getsockname(), connection.sock.getpeername()
            connection.request("GET", f"{self._path}knock")
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise ConnectionError(f"no store answers: {error!r}") from error
        finally:
            connection.close()
        if status == http.client.FORBIDDEN:
            raise PermissionError(f"refused with status {status}")
        if status not in (_OK, _NOT_FOUND):
            raise ConnectionError(f"no store answers: status {status}")
        return str(own[0]), str(theirs[0])

    def _signed(self, name: str, value: Any) -> bytes:
        text = json.dumps(value).encode()
        return self._signature(name, text) + text

    def _verified(self, name: str, body: bytes | None) -> Any:
        signature, text = (body or b"")[:64], (body or b"")[64:]
        if not hmac.compare_digest(signature, self._signature(name, text)):
            return None
        return json.loads(text)

    def _signature(self, name: str, text: bytes) -> bytes:
        message = name.encode() + b"\n" + text
        return hmac.new(self._key, message, hashlib.sha256).hexdigest().encode()


class FirstHostStore(HostStore):
    """The same values in the process that has the store.

    Args:
        store: The store.
        secret: Secret of the job, which is admitted from now on.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__("localhost", store.port, secret)
        self._store = store
        store.admit(secret)

    def of_kind(self, kind: str) -> dict[str, Any]:
        """All values with names of the form KIND.REST, by the rest, in their order."""
        found = self.get_all(f"{kind}.")
        return {name.partition(".")[2]: value for name, value in found.items()}

    def get_all(self, prefix: str) -> dict[str, Any]:
        """All values whose names begin with a prefix, the first ones first."""
        found = {
            name: self._verified(name, body)
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
