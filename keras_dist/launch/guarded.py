"""The requests that the store answers: those of a job, and whole ones."""

import hmac
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist.launch.monitor.status_store import ALL

_OK, _BAD_REQUEST, _FORBIDDEN, _TIMEOUT = 200, 400, 403, 408

# Nobody is admitted yet: who has the right secret is to ask again.
_TOO_EARLY = 503

# Bytes of one value at most. The largest are the addresses that Gloo keeps for a rank,
# 0.15 MB where there are 1,000 ranks.
_LARGEST = 1 << 26


def guarded(
    handler: Any,
    tokens: Mapping[str, str],
    public: Mapping[str, Callable[[], bytes]],
) -> Any:
    """A subclass of Horovod's request handler that requires a token.

    Args:
        handler: Horovod's.
        tokens: For each token: what stands before the names of its scopes.
        public: What strangers may read, too: by path, what makes the value.
    """
    own = {"tokens": tokens, "public": public, "inherited": handler}
    return type(
        "Guarded", (_Guard, handler), {**own, "one_at_a_time": threading.Lock()}
    )


class _Guard:
    """What comes before the methods of Horovod's handler."""

    tokens: Mapping[str, str]
    public: Mapping[str, Callable[[], bytes]]
    inherited: Any
    one_at_a_time: threading.Lock

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
        make = self.public.get(self.path.lstrip("/"))
        if make is not None:
            with self.one_at_a_time:
                value = make()
            self._answer(value)
        elif self._is_admitted():
            if self.path.endswith(ALL):
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
        """All values whose names begin as the requested one."""
        _, scope, prefix = self.path.removesuffix(ALL).split("/")
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
