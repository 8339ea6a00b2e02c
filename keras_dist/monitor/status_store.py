"""What the ranks write for each other to read, while none of them is in a collective.

The board is the key-value store of the launcher, through which Horovod's ranks find
each other: that of `horovodrun` and of `keras-dist run`. Under `mpirun` there is none.
"""

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_SCOPE = "keras_dist_watch"
_SECONDS = 2.0


class StatusStore:
    """Small values of JSON by name, in the launcher's store.

    Args:
        address: Host, and whatever Horovod is given behind it.
        port: Of the store.
    """

    def __init__(self, address: str, port: str) -> None:
        # Put together as Horovod does it, with which the secret of `keras-dist run`
        # becomes the beginning of the path.
        url = urlsplit(f"http://{address}:{port}/{_SCOPE}/")
        self._host, self._port, self._path = url.hostname, url.port, url.path

    def put(self, name: str, value: Any) -> None:
        """Write a value; what cannot be reached stays as it is."""
        self._ask("PUT", name, json.dumps(value).encode())

    def get(self, name: str) -> Any:
        """Read a value; `None` where there is none."""
        try:
            return json.loads(self._ask("GET", name) or "null")
        except ValueError:
            return None

    def _ask(self, method: str, name: str, body: bytes | None = None) -> bytes | None:
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


def status_store_of(environ: Mapping[str, str] | None = None) -> StatusStore | None:
    """The board of the launcher that started this process, if it has one."""
    environ = os.environ if environ is None else environ
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    return StatusStore(address, port) if address and port else None
