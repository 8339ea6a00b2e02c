"""Small values that ranks write for each other without a collective: heartbeats.

They are kept in the launcher's key-value store, in which Horovod's ranks find each
other (the rendezvous). `horovodrun` and `keras-dist run` have one, `mpirun` does not.
"""

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

# Of Horovod's store: what stands before all names.
SCOPE = "keras_dist_watch"
_SECONDS = 2.0

# In the store of `keras-dist run`, a name that ends so reads all that begin with it.
ALL = "*"


class StatusStore:
    """Small JSON values by name, in the launcher's key-value store.

    Args:
        address: Address of the store, as the launcher passes it to Horovod. That of
            `keras-dist run` has a port and the secret of the job behind the host.
        port: Port of the store.
    """

    def __init__(self, address: str, port: str) -> None:
        # Horovod makes its URLs in the same way. The secret that `keras-dist run` puts
        # into the address so becomes the first part of the path.
        url = urlsplit(f"http://{address}:{port}/{SCOPE}/")
        self._host, self._port, self._path = url.hostname, url.port, url.path

    def put(self, name: str, value: Any) -> bool:
        """Write a value; whether the store could be reached."""
        return self._request("PUT", name, json.dumps(value).encode()) is not None

    def get(self, name: str) -> Any:
        """Read a value; `None` if there is none, or the store cannot be reached."""
        return self._decoded(name, self._request("GET", name))

    def get_all(self, prefix: str) -> dict[str, Any] | None:
        """Read all values whose names begin with a prefix, by one request.

        Returns:
            `None` if the store cannot be reached, or is Horovod's, which cannot do it.
        """
        found = _value_of(self._request("GET", f"{prefix}{ALL}"))
        if not isinstance(found, dict):
            return None
        texts = {name: str(text).encode("latin-1") for name, text in found.items()}
        return {name: self._decoded(name, text) for name, text in texts.items()}

    def _decoded(self, name: str, text: bytes | None) -> Any:
        """The value of a name that the store has as this text."""
        return _value_of(text)

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> bytes | None:
        if self._host is None:
            return None
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=_SECONDS
        )
        try:
            connection.request(method, self._path + name, body)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _value_of(text: bytes | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):  # not written by `put`
        return None


def status_store_of(environ: Mapping[str, str] | None = None) -> StatusStore | None:
    """The store of the launcher that started this process; `None` if it has none.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return StatusStore(address, port) if address and port else None
